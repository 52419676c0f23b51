"""Blocks of keys and values on their way round a ring of ranks (needs torch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives.padding import check_share, unpadded_length
from vitsweep.collectives.primitives import RingPass
from vitsweep.model.attention import Attend
from vitsweep.techniques.sequence_parallel.block_attention import BlockAttention, block_attention

CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True)
class Parts:
    """Which tokens each rank of a ring holds.

    Attributes:
        num_tokens: of an image, without the padding at their end.
        ranks: length of the ring.
        per_rank: 1, or 2 where rank r holds parts r and 2 n - 1 - r ("zigzag").
        causal: a token attends to itself and earlier ones only.
    """

    num_tokens: int
    ranks: int
    per_rank: int
    causal: bool

    def of(self, rank: int) -> tuple[int, ...]:
        """Global indices of a rank's parts, in their local order."""
        return (rank,) if self.per_rank == 1 else (rank, 2 * self.ranks - 1 - rank)

    def pairs(self, local: int, here: int, source: int) -> Iterator[tuple[slice, slice, bool]]:
        """Yield queries here, keys of `source` that they attend to, and whether masked causally."""
        part = local // self.per_rank
        for i, mine in enumerate(self.of(here)):
            for j, other in enumerate(self.of(source)):
                keys = unpadded_length(self.num_tokens, part, other)
                if keys and not (self.causal and other > mine):
                    masked = self.causal and other == mine
                    # A masked block is square, without the queries of padding: kernels align the
                    # mask of another shape to its upper left corner (CPU) or lower right one (CUDA).
                    queries = keys if masked else part
                    yield (
                        slice(i * part, i * part + queries),
                        slice(j * part, j * part + keys),
                        masked,
                    )


def round_ring(
    num_tokens: int,
    padded: int,
    group: ProcessGroup,
    *,
    per_rank: int = 1,
    causal: bool = False,
    scores_in_memory: bool = False,
) -> Attend:
    """Return an `attend` on this rank's tokens to the tokens of all ranks.

    Args:
        num_tokens: over all ranks, without padding.
        padded: the same with padding; every rank holds the same share of it.
        group: the ring.
        per_rank: parts that each rank holds.
        causal: a token attends to itself and earlier ones only.
        scores_in_memory: use the plain kernel.
    """
    parts = Parts(num_tokens, group.size(), per_rank, causal)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_share(q, 2, padded, group)  # a message of another size would hang, or be cut
        kernel = block_attention(q, scores_in_memory=scores_in_memory)
        return _Ring.apply(q, k, v, parts, kernel, group)

    return around


def ring_in_place_of(
    attend: Attend, num_tokens: int, padded: int, group: ProcessGroup, *, zigzag: bool
) -> Attend:
    """Return a ring that computes what the kernel `attend` does, mask included."""
    causal = getattr(attend, "causal", False)
    return round_ring(num_tokens, padded, group, per_rank=2 if zigzag else 1, causal=causal)


class _Ring(torch.autograd.Function):
    """Ring attention (Liu et al., arXiv:2310.01889), softmax statistics merged as blocks arrive."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: Parts,
        kernel: BlockAttention,
        group: ProcessGroup,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        # Heads inside tokens: the output projection then reads this very memory.
        out = torch.zeros_like(q.transpose(1, 2), dtype=wide, memory_format=CONTIGUOUS)
        out = out.transpose(1, 2)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        for source, block in _passing_blocks(torch.stack((k, v)), group):
            for queries, keys, masked in parts.pairs(q.shape[2], group.rank(), source):
                key, value = block[:, :, :, keys]
                o, part_lse = kernel.forward(q[:, :, queries], key, value, masked)
                _merge(out[:, :, queries], lse[:, :, queries], o, part_lse)
        out = out.to(q.dtype)
        # k and v lie with q in the memory of their projection; the stacked copy is not kept.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = parts, kernel, group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        kv = torch.stack((k, v))
        parts, kernel, group = ctx.ring
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
        gradient, hop = gradient.contiguous(), None
        for source, block in _passing_blocks(kv, group):
            own = torch.zeros_like(dkv) if hop else dkv
            for a, b, masked in parts.pairs(q.shape[2], group.rank(), source):
                saved = (t[:, :, a].contiguous() for t in (out, lse))
                key, value = block[:, :, :, b]
                of_q, of_k, of_v = kernel.backward(
                    gradient[:, :, a].contiguous(), q[:, :, a], key, value, *saved, masked
                )
                dq[:, :, a] += of_q
                own[0, :, :, b] += of_k
                own[1, :, :, b] += of_v
            if hop:  # sent by the previous rank while this one computed
                own += hop.arrived()
            dkv = own
            if group.size() > 1:  # the gradient travels with its block, and one hop more: home
                hop = RingPass(dkv, group)
        dk, dv = (hop.arrived() if hop else dkv).to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def _passing_blocks(own: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (source rank, block), own block first, while the next one is received."""
    size, block = group.size(), own
    for hop in range(size):
        coming = RingPass(block, group) if hop + 1 < size else None
        yield (group.rank() - hop) % size, block
        if coming:
            block = coming.arrived()


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block to the softmax over those before, in place."""
    total = torch.logaddexp(lse, block_lse)
    weight, block_weight = ((part - total).exp().unsqueeze(-1) for part in (lse, block_lse))
    out.mul_(weight).add_(block_out * block_weight)
    lse.copy_(total)
