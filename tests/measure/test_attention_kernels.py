"""The kernel of attention that ran stands in the record, whichever was asked for."""

import pytest
import torch

from tests.choices import choice
from tests.shapes import build, step
from vitsweep.measure.environment import AttentionKernels


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ("sdpa_auto", "flash (cpu)"),
        ("sdpa_flash", "flash (cpu)"),
        ("sdpa_math", "math"),
        ("mha_module", "math"),
    ],
)
def test_the_kernel_that_ran_is_named(attention: str, kernel: str) -> None:
    model = choice("attention", attention).apply(build())
    kernels = AttentionKernels()
    with kernels.noted():
        step(model)
    assert kernels.name == kernel


def test_a_model_without_attention_names_none() -> None:
    kernels = AttentionKernels()
    with kernels.noted():
        torch.softmax(torch.randn(2, 3), -1)
    assert kernels.name is None


@pytest.mark.full
def test_compiled_blocks_name_their_kernel_too() -> None:
    torch._dynamo.reset()
    model = choice("compilation", "compile_blocks").apply(build(dtype=torch.float32))
    step(model)
    kernels = AttentionKernels()
    with kernels.noted():
        step(model)
    assert kernels.name == "flash (cpu)"
