"""TensorFloat-32 is switched for all that may use it, and everyone may ask for it afterwards."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.backends import cuda, cudnn

from vitsweep.world import allow_tf32


def inside_cudnn_flags() -> bool:
    with cudnn.flags():  # reads every flag and sets it again
        return True


READS: dict[str, Callable[[], object]] = {
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "matmul.allow_tf32": lambda: cuda.matmul.allow_tf32,
    "cublas": torch._C._get_cublas_allow_tf32,
    "matmul": lambda: cuda.matmul.fp32_precision,
    "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
    "conv": lambda: cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    "rnn": lambda: cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
}
"""Every way to ask torch; TorchInductor, timm and transformers use the older ones."""
ON = {
    "float32_matmul_precision": "high",
    "matmul.allow_tf32": True,
    "cublas": True,
    "matmul": "tf32",
    "cudnn.allow_tf32": True,
    "conv": "tf32",
    "rnn": "tf32",
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    allow_tf32(False)


def test_every_flag_of_tf32_is_switched_and_can_be_read() -> None:
    for allowed in (True, False, True, False):
        allow_tf32(allowed)
        found = {name: read() for name, read in READS.items()}
        assert inside_cudnn_flags()
        if allowed:
            assert found == ON
        else:
            assert found["float32_matmul_precision"] == "highest"
            off = ("matmul.allow_tf32", "cublas", "cudnn.allow_tf32")
            assert [found[name] for name in off] == [False] * 3
            assert "tf32" not in found.values()


def test_flags_that_another_library_set_by_the_newer_way_alone_are_overruled() -> None:
    cuda.matmul.fp32_precision = "tf32"
    cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    allow_tf32(False)
    assert "tf32" not in [read() for read in READS.values()]


@pytest.mark.gpu(count=1)
def test_a_gpu_multiplies_in_tf32_only_where_it_is_allowed() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    errors = {}
    for allowed in (True, False):
        allow_tf32(allowed)
        errors[allowed] = float((a @ b - exact).norm() / exact.norm())
    assert errors[False] < 1e-5 < 1e-4 < errors[True]
