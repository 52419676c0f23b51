"""Parts of images that ranks hold, on one process: blocks of keys, states, and the order of parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitsweep.collectives import primitives
from vitsweep.model.attention import TokenAxis
from vitsweep.model.block import Stack
from vitsweep.techniques.sequence_parallel import linear_states, ring_attention
from vitsweep.techniques.sequence_parallel.linear_states import _Gathered, _Total
from vitsweep.techniques.sequence_parallel.ring_attention import (
    FlashOnCpu,
    FlashOnCuda,
    Parts,
    Plain,
    _compiled,
    _merge,
    _passing_blocks,
    _Ring,
    block_attention,
)
from vitsweep.techniques.sequence_parallel.token_sharding import (
    from_zigzag,
    shard_tokens,
    to_zigzag,
)
from vitsweep.techniques.sequence_parallel.usp import Usp


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_a_block_return_output_logsumexp_and_gradients(causal: bool) -> None:
    q, k, v = (drawn(2, 3, 5, 4, seed=s).requires_grad_() for s in range(3))
    wanted = attention(q, k, v, causal)
    upstream = drawn(2, 3, 5, 4, seed=3)
    gradients = torch.autograd.grad(wanted, (q, k, v), upstream)
    scores = (q @ k.mT / 2).masked_fill(~torch.ones(5, 5).bool().tril() & causal, -torch.inf)
    for kernel in (Plain(), FlashOnCpu()):
        with torch.no_grad():
            out, lse = kernel.forward(q, k, v, causal)
            torch.testing.assert_close(out, wanted.detach())
            torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
            found = kernel.backward(upstream, (q, k, v, out, lse), causal)
        torch.testing.assert_close(found, gradients)


def test_a_kernel_is_chosen_by_device_digits_and_width() -> None:
    assert isinstance(block_attention(torch.zeros(1, 1, 1, 8)), FlashOnCpu)
    for dtype, width, kind in (
        (torch.bfloat16, 8, FlashOnCuda),
        (torch.float16, 16, FlashOnCuda),
        (torch.float16, 12, Plain),
        (torch.float32, 8, Plain),
    ):
        like = torch.zeros(1, 1, 1, width, dtype=dtype, device="meta")
        assert isinstance(block_attention(like), kind)


def test_blocks_are_merged_by_the_weights_of_their_scores() -> None:
    q, k, v = (drawn(1, 2, 3, 4, seed=s) for s in range(3))
    halves = [
        Plain().forward(q, k[:, :, part], v[:, :, part], False) for part in (slice(2), slice(2, 3))
    ]
    (out, lse), second = halves
    _merge(out, lse, *second)
    torch.testing.assert_close(out, attention(q, k, v, False))
    torch.testing.assert_close(lse, (q @ k.mT / 2).logsumexp(-1))


def test_parts_of_a_rank_are_one_or_one_from_either_end() -> None:
    assert [Parts(12, 3, 1, False).of(rank) for rank in range(3)] == [(0,), (1,), (2,)]
    assert [Parts(12, 3, 2, False).of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_ranks_of_a_ring_attend_to_what_the_mask_lets_them(
    per_rank: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks, 10 tokens: padding is at the end of the last part or parts."""
    ranks, tokens = 3, 10
    part = -(-tokens // (ranks * per_rank))
    padded = ranks * per_rank * part
    whole = [primitives.pad(drawn(2, 2, tokens, 4, seed=s), 2, padded) for s in range(3)]
    wanted = attention(*(x[:, :, :tokens] for x in whole), causal)
    parts = Parts(tokens, ranks, per_rank, causal)

    def own(x: Tensor, rank: int) -> Tensor:
        cut = x.split(part, 2)
        return torch.cat([cut[index] for index in parts.of(rank)], 2)

    for rank in range(ranks):
        blocks = [
            (source, torch.stack([own(x, source) for x in whole[1:]]))
            for source in ((rank - hop) % ranks for hop in range(ranks))
        ]
        monkeypatch.setattr(ring_attention, "_passing_blocks", lambda *_, found=blocks: found)
        q, k, v = (own(x, rank) for x in whole)
        monkeypatch.setattr(ring_attention, "_RINGS", [(parts, group(rank, ranks))])
        for kernel in (Plain(), FlashOnCpu()):
            monkeypatch.setattr(ring_attention, "block_attention", lambda q, found=kernel: found)
            out = _Ring.apply(q, k, v, 0)
            assert torch.equal(_compiled(q, k, v, 0)[0], out)
            for index, number in enumerate(parts.of(rank)):
                kept = primitives.unpadded_length(tokens, part, number)
                found = out[:, :, index * part : index * part + kept]
                torch.testing.assert_close(found, wanted[:, :, number * part :][:, :, :kept])


def test_a_ring_of_one_has_the_gradients_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as well, where a compiler is told shapes, dtypes and strides."""
    for per_rank, causal in ((1, False), (1, True), (2, True)):
        q, k, v = (drawn(2, 2, 6, 4, seed=s).requires_grad_() for s in range(3))
        upstream = drawn(2, 2, 6, 4, seed=3)
        wanted = torch.autograd.grad(attention(q, k, v, causal), (q, k, v), upstream)
        rings = [(Parts(6, 1, per_rank, causal), group(0, 1))]
        monkeypatch.setattr(ring_attention, "_RINGS", rings)
        for out in (_Ring.apply(q, k, v, 0), _compiled(q, k, v, 0)[0]):
            torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), upstream), wanted)
        torch.library.opcheck(_compiled, (q, k, v, 0))


def test_a_block_comes_from_one_rank_earlier_with_each_hop(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    class Pass:
        def __init__(self, block: Tensor, ring: Any) -> None:
            sent.append(float(block))
            self.block = block

        def arrived(self) -> Tensor:
            return self.block - 1

    monkeypatch.setattr(ring_attention, "RingPass", Pass)
    found = [
        (source, float(block)) for source, block in _passing_blocks(torch.tensor(1.0), group(1, 4))
    ]
    assert found == [(1, 1.0), (0, 0.0), (3, -1.0), (2, -2.0)]
    assert sent == [1.0, 0.0, -1.0]


def test_parts_are_dealt_out_from_both_ends_and_back() -> None:
    x, along = torch.arange(12).reshape(1, 12), TokenAxis(1, 12)
    assert to_zigzag(x, along, 3).tolist() == [[0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]]
    assert torch.equal(from_zigzag(to_zigzag(x, along, 3), along, 3), x)


def test_states_of_earlier_ranks_fade_with_the_tokens_in_between(monkeypatch) -> None:
    states = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    monkeypatch.setattr(primitives, "all_gather", lambda own, axis, group: states)
    for rank, before, after in (
        (0, 0.0, 10 + 100 * 0.5 + 1000 * 0.25),
        (2, 10 + 0.5, 1000.0),
        (3, 105.25, 0.0),
    ):
        own = states[rank].clone().requires_grad_()
        found = _Gathered.apply(own, 0.5, group(rank, 4))
        assert float(found.detach()) == before
        assert float(torch.autograd.grad(found, own)[0]) == after
    own = states[1].clone().requires_grad_()
    found = _Total.apply(own, group(1, 4))
    assert float(found.detach()) == 1111.0
    assert float(torch.autograd.grad(found, own)[0]) == 1111.0


def test_a_chain_receives_adds_and_sends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def wait_for(operation: Any, tensor: Tensor, rank: int, ranks: Any) -> None:
        told.append((operation.__name__, rank, float(tensor)))
        if operation.__name__ == "irecv":
            tensor.fill_(8.0)

    monkeypatch.setattr(linear_states, "_wait_for", wait_for)
    own = torch.tensor(3.0)
    for rank, step, before, calls in (
        (0, 1, 0.0, [("isend", 1, 3.0)]),
        (1, 1, 8.0, [("irecv", 0, 0.0), ("isend", 2, 7.0)]),
        (2, 1, 8.0, [("irecv", 1, 0.0)]),
        (2, -1, 0.0, [("isend", 1, 3.0)]),
        (1, -1, 8.0, [("irecv", 2, 0.0), ("isend", 0, 7.0)]),
        (0, -1, 8.0, [("irecv", 1, 0.0)]),
    ):
        told.clear()
        assert float(linear_states._along_chain(own, 0.5, group(rank, 3), step)) == before
        assert told == calls


def test_ulysses_takes_what_divides_the_heads_and_leaves_two_ranks_to_the_ring() -> None:
    def degrees(ranks: int, heads: int | None, per_node: int = 64) -> tuple[int, int]:
        model = {} if heads is None else {"num_heads": heads}
        tree = {"model": model, "resources": {"ranks_per_node": per_node}}
        found = Usp.default_degrees(ranks, tree)
        return found["ulysses"], found["ring"]

    assert [degrees(ranks, 12) for ranks in (1, 2, 3, 4, 6, 8)] == [
        (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2),
    ]  # fmt: skip
    assert degrees(8, 12, per_node=2) == (2, 4)
    assert degrees(8, 3) == degrees(8, None) == (1, 8)
    assert degrees(16, 64) == (8, 2)


def test_tokens_are_dealt_out_in_their_order_unless_a_ring_takes_both_ends() -> None:
    """On one rank five tokens stay five, and are six where they are dealt out from both ends."""
    x, along = torch.arange(10.0).reshape(1, 5, 2), TokenAxis(1, 5)
    for more, length in (((), 5), ((1,), 6)):
        stack = Stack([], norm=nn.Identity(), axes=(along,))
        shard_tokens(stack, along, along, group(0, 1), *more)
        own = stack(x)
        assert own.shape == (1, length, 2)
        assert torch.equal(stack.norm(own), x)
