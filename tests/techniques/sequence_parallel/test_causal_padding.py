"""Causal ring attention with padded tokens, under either alignment of a kernel's causal mask.

FlashAttention on CUDA aligns the mask of T queries and S keys to the lower right corner (query t sees
keys up to t + S - T), torch's kernel on CPU to the upper left one.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.techniques.sequence_parallel.cases import answers, cell
from tests.techniques.sequence_parallel.equal import pass_differences
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.sequence_parallel import ring_attention
from vitsweep.techniques.sequence_parallel.ring_attention import Gradients, Plain, Saved
from vitsweep.world import World

PADDED = ("attention=sdpa_causal", "classifier=pooled", "batch.resolution_px=10")
"""25 tokens: padded for every even number of ranks."""
ZIGZAG = (*PADDED, "sequence_parallel.order=zigzag")
CASES = [
    ("sequence_parallel=ring", *PADDED),
    ("sequence_parallel=ring", *ZIGZAG),
    ("sequence_parallel=usp", *PADDED),
    ("sequence_parallel=usp", *ZIGZAG),
]


class LowerRight(Plain):
    """The reference kernel with a mask as FlashAttention has it on CUDA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        bias = self.bias(q, k, causal)
        scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def backward(self, gradient: Tensor, saved: Saved, causal: bool) -> Gradients:
        q, k, v, out, lse = saved
        scores = q @ k.mT * q.shape[-1] ** -0.5 + self.bias(q, k, causal)
        p = (scores - lse.unsqueeze(-1)).exp()
        delta = (gradient * out).sum(-1, keepdim=True)
        ds = p * (gradient @ v.mT - delta) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ gradient

    @staticmethod
    def bias(q: Tensor, k: Tensor, causal: bool) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        shape = torch.full((queries, keys), float("-inf"), dtype=q.dtype)
        return shape.triu(1 + keys - queries) if causal else torch.zeros_like(shape)


def with_either_mask(world: World, cells: list[CellSpec]) -> list[dict[str, dict[str, float]]]:
    upper = pass_differences(world, cells)
    ring_attention.block_attention = lambda q: LowerRight()  # type: ignore[assignment]
    lower = pass_differences(world, cells)
    return [{"upper": a, "lower": b} for a, b in zip(upper, lower, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_padded_causal_rings_equal_one_process(ranks: int, tmp_path: Path) -> None:
    cells = [cell(ranks, *case) for case in CASES]
    for name, both in answers(with_either_mask, cells, tmp_path):
        for mask, apart in both.items():
            assert max(apart["output"], apart["input"], apart["weights"]) < 1e-10, (mask, name)
            assert apart["scale"] > 1e-3, (mask, name)
