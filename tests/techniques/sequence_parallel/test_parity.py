"""Building blocks beside outside code and plain formulas on the same inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitsweep.model.attention import TokenAxis
from vitsweep.model.linear_attention import LinearAttend
from vitsweep.techniques.sequence_parallel.ring_attention import (
    BlockAttention,
    FlashOnCpu,
    FlashOnCuda,
    Plain,
    _merge,
)
from vitsweep.techniques.sequence_parallel.token_sharding import from_zigzag, to_zigzag


def qkv(tokens: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    shape = (3, 2, 4, tokens, 8)
    return [t.requires_grad_() for t in torch.randn(shape, dtype=dtype, device=device)]


@pytest.mark.parametrize("kernel", [Plain(), FlashOnCpu()])
def test_blocks_merged_by_logsumexp_are_scaled_dot_product_attention(
    kernel: BlockAttention,
) -> None:
    q, k, v = qkv(12)
    wanted = F.scaled_dot_product_attention(q, k, v)
    gradient = torch.randn_like(wanted)
    wanted_gradients = torch.autograd.grad(wanted, (q, k, v), gradient)

    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    blocks = [slice(0, 5), slice(5, 12)]
    for block in blocks:
        _merge(out, lse, *kernel.forward(q, k[:, :, block], v[:, :, block], False))
    saved = [(q, k[:, :, b], v[:, :, b], out, lse) for b in blocks]
    parts = [kernel.backward(gradient, of_block, False) for of_block in saved]

    exact = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(out, wanted, **exact)
    torch.testing.assert_close(parts[0][0] + parts[1][0], wanted_gradients[0], **exact)
    for i in (1, 2):
        joined = torch.cat([part[i] for part in parts], 2)
        torch.testing.assert_close(joined, wanted_gradients[i], **exact)


@pytest.mark.parametrize("kernel", [Plain(), FlashOnCpu()])
def test_a_causal_block_is_causal_attention(kernel: BlockAttention) -> None:
    q, k, v = qkv(7)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(wanted.sum(), (q, k, v))
    out, lse = kernel.forward(q, k, v, True)
    found = kernel.backward(torch.ones_like(out), (q, k, v, out, lse), True)
    for a, b in zip((out, *found), (wanted, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.gpu(count=1)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_on_cuda_gives_what_the_reference_block_gives_in_float64(causal: bool) -> None:
    """Rounding of bfloat16 alone lies below 0.01; beside plain attention in bfloat16, both would round."""
    inputs = [t.detach() for t in qkv(64, torch.bfloat16, "cuda")]
    gradient = torch.randn_like(inputs[0])

    def results(kernel: BlockAttention, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, g = (t.to(dtype) for t in (*inputs, gradient))
        out, lse = kernel.forward(q, k, v, causal)
        return [t.double() for t in (out, lse, *kernel.backward(g, (q, k, v, out, lse), causal))]

    exact, found = results(Plain(), torch.float64), results(FlashOnCuda(), torch.bfloat16)
    apart = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    assert max(apart) < 0.01, apart


@pytest.mark.parametrize(("causal", "decay"), [(False, 1.0), (True, 1.0), (True, 0.95)])
def test_linear_attention_is_its_quadratic_form(causal: bool, decay: float) -> None:
    q, k, v = qkv(150)  # more than two chunks
    t = torch.arange(150, dtype=q.dtype)
    weights = decay ** (t[:, None] - t).abs()
    if causal:
        weights = weights.tril()
    scores = (1 + F.elu(q)) @ (1 + F.elu(k)).mT / q.shape[-1] * weights
    wanted = scores @ v / weights.sum(-1, keepdim=True)

    found = LinearAttend(causal, decay)(q, k, v)

    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(found.sum(), (q, k, v)),
        torch.autograd.grad(wanted.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zigzag_deals_out_both_ends_and_comes_back(ranks: int) -> None:
    x, along = torch.arange(16).reshape(1, 16, 1), TokenAxis(1, 16)
    dealt = to_zigzag(x, along, ranks)
    part = 16 // (2 * ranks)
    assert dealt[0, :part, 0].tolist() == list(range(part))
    assert dealt[0, part : 2 * part, 0].tolist() == list(range(16 - part, 16))
    assert torch.equal(from_zigzag(dealt, along, ranks), x)


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_causal_linear_attention_takes_as_many_operations_for_any_number_of_tokens(
    decay: float,
) -> None:
    counts = []
    for tokens in (256, 4096):
        with Operations() as operations:
            LinearAttend(True, decay)(*qkv(tokens, torch.float32)).sum().backward()
        counts.append(operations.count)
    assert counts[0] == counts[1] < 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("causal", "decay"), [(False, 1.0), (True, 1.0), (True, 0.95)])
def test_linear_attention_in_half_precision_is_that_of_double_within_rounding(
    causal: bool, decay: float, dtype: torch.dtype
) -> None:
    q, k, v = qkv(1000)
    attend = LinearAttend(causal, decay)
    wanted = attend(q, k, v)
    found = attend(*(t.to(dtype) for t in (q, k, v)))
    assert found.dtype == dtype
    gradients = [torch.autograd.grad(o.double().sum(), (q, k, v)) for o in (wanted, found)]
    for a, b in zip((found, *gradients[1]), (wanted, *gradients[0]), strict=True):
        assert float((a - b).detach().norm() / b.detach().norm()) < 2e-2


def test_linear_attention_stays_in_the_range_of_float16_over_many_tokens() -> None:
    ones = torch.ones(1, 1, 70_000, 4, dtype=torch.float16)
    for causal in (True, False):
        found = LinearAttend(causal, 1.0)(ones * 3, ones * 3, ones)
        torch.testing.assert_close(found, torch.full_like(found, 16.0), rtol=1e-2, atol=0)
