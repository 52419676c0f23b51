"""Blocks of keys and values on their way round a ring of ranks (needs torch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives.primitives import RingPass, check_share, unpadded_length
from vitsweep.model.attention import Attend

# Attention to one block of keys and values, with what is needed to merge blocks (needs torch).
#
# softmax(q k^T) v over all keys is the mean of the blocks' outputs, weighted by exp(logsumexp of a
# block's scores): Rabe and Staats, arXiv:2112.05682; FlashAttention, arXiv:2205.14135.


aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, output and logsumexp; the last two over *all* blocks."""


class BlockAttention(Protocol):
    """Axes: B images, H heads, T queries, S keys of one block, K head width."""

    def forward(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output (B, H, T, K) and the logsumexp of its scores (B, H, T)."""

    def backward(self, gradient: Tensor, saved: Saved, causal: bool) -> Gradients:
        """Return the gradients of q, k and v."""


class Plain:
    """Scores in memory: for every device, dtype and shape, and to compare others with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Keep nothing but the logsumexp."""
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse

    def backward(self, gradient: Tensor, saved: Saved, causal: bool) -> Gradients:
        """FlashAttention, algorithm 4: D = sum(dO * O), dS = P * (dO v^T - D)."""
        q, k, v, out, lse = saved
        p = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
        delta = (gradient * out).sum(-1, keepdim=True)
        ds = (p * (gradient @ v.mT - delta) * q.shape[-1] ** -0.5).to(q.dtype)
        return ds @ k, ds.mT @ q, p.to(q.dtype).mT @ gradient


class FlashOnCpu:
    """The kernel behind scaled_dot_product_attention on CPU; every float type."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Call the kernel that returns the logsumexp too."""
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(self, gradient: Tensor, saved: Saved, causal: bool) -> Gradients:
        """Call its backward."""
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *saved, 0.0, causal
        )


class FlashOnCuda:
    """FlashAttention 2 in torch: float16 and bfloat16, head widths divisible by 8."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Call the kernel that returns the logsumexp too."""
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]

    def backward(self, gradient: Tensor, saved: Saved, causal: bool) -> Gradients:
        """Call its backward; without dropout the random state is not read."""
        none: Any = None
        q, k, *_ = saved
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = q.shape[2], k.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, *saved, none, none, *lengths, 0.0, causal, unused, unused
        )


def block_attention(q: Tensor) -> BlockAttention:
    """Return the kernel for tensors like `q`."""
    if q.device.type == "cpu":
        return FlashOnCpu()
    if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
        return FlashOnCuda()
    return Plain()


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


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


def ring_in_place_of(
    attend: Attend, num_tokens: int, padded: int, group: ProcessGroup, *, zigzag: bool
) -> Attend:
    """Return an `attend` on this rank's tokens to the tokens of all ranks, with the mask of a kernel.

    Args:
        attend: the kernel.
        num_tokens: over all ranks, without padding.
        padded: the same with padding; every rank holds the same share of it.
        group: the ring.
        zigzag: each rank holds two parts, one from either end.
    """
    causal = getattr(attend, "causal", False)
    ring = Parts(num_tokens, group.size(), 2 if zigzag else 1, causal), group
    if ring not in _RINGS:
        _RINGS.append(ring)
    number = _RINGS.index(ring)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_share(q, 2, padded, group)  # a message of another size would hang, or be cut
        if torch.compiler.is_compiling():
            return _compiled(q, k, v, number)[0]
        return _Ring.apply(q, k, v, number)

    return around


_RINGS: list[tuple[Parts, ProcessGroup]] = []
"""By the number that compiled code has for one."""


def _attend(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp over all blocks, merged as these arrive (Liu et al., arXiv:2310.01889)."""
    (parts, group), kernel = _RINGS[number], block_attention(q)
    out, lse = _empty_results(q, torch.promote_types(q.dtype, torch.float32))
    if parts.causal:  # queries of padding, which masked blocks leave out
        out.zero_()
        lse.fill_(float("-inf"))
    begun: list[int] = []
    for source, block in _passing_blocks(torch.stack((k, v)), group):
        for queries, keys, masked in parts.pairs(q.shape[2], group.rank(), source):
            key, value = block[:, :, :, keys]
            found = kernel.forward(q[:, :, queries], key, value, masked)
            before = out[:, :, queries], lse[:, :, queries]
            if queries.start in begun:
                _merge(*before, *found)
            else:
                begun.append(queries.start)
                torch._foreach_copy_(before, found)
    return out.to(q.dtype), lse


def _empty_results(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # Heads inside tokens: the output projection then reads this very memory.
    out = torch.empty_like(q.transpose(1, 2), dtype=dtype, memory_format=CONTIGUOUS)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out.transpose(1, 2), torch.empty(q.shape[:3], dtype=wide, device=q.device)


def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q, and those of k and v in one tensor (2, B, H, S, K)."""
    (parts, group), kernel = _RINGS[number], block_attention(q)
    kv = torch.stack((k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
    gradient, hop = gradient.contiguous(), None
    for source, block in _passing_blocks(kv, group):
        found = []
        for a, b, masked in parts.pairs(q.shape[2], group.rank(), source):
            key, value = block[:, :, :, b]
            own, own_lse = (t[:, :, a].contiguous() for t in (out, lse))
            saved = q[:, :, a], key, value, own, own_lse
            of_q, *of_kv = kernel.backward(gradient[:, :, a].contiguous(), saved, masked)
            dq[:, :, a] += of_q
            found.append((b, of_kv))
        if hop:  # sent by the previous rank while this one computed
            dkv = hop.arrived()
        for b, of_kv in found:
            for total, part in zip(dkv[:, :, :, b], of_kv, strict=True):
                total += part
        if group.size() > 1:  # the gradient travels with its block, and one hop more: home
            hop = RingPass(dkv, group)
    dkv = hop.arrived() if hop else dkv
    return dq.to(q.dtype), dkv.to(kv.dtype).contiguous()


class _Ring(torch.autograd.Function):
    """Ring attention outside of compiled code, where modes that count see its kernels."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        out, lse = _attend(q, k, v, number)
        _keep(ctx, (q, k, v, number), (out, lse))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = _gradients(gradient, q, k, v, out, lse, ctx.number)
        return dq, *dkv, None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Any) -> None:
    # k and v lie with q in the memory of their projection; the stacked copy is not kept.
    *qkv, ctx.number = inputs
    ctx.save_for_backward(*qkv, *output)


# The same for a compiler, in one operation: what ranks compute differs where their parts or masks do, and a
# compiler that saw hops would move or repeat them on each rank as it likes. Then ranks wait forever.

_compiled = torch.library.custom_op("vitsweep::ring_attention", _attend, mutates_args=())
_compiled_gradients = torch.library.custom_op(
    "vitsweep::ring_attention_backward", _gradients, mutates_args=()
)
_compiled.register_fake(lambda q, k, v, number: _empty_results(q, q.dtype))
_compiled_gradients.register_fake(
    lambda gradient, q, k, *_: (torch.empty_like(q), k.new_empty((2, *k.shape)))
)


def _compiled_backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
    dq, dkv = _compiled_gradients(gradient, *ctx.saved_tensors, ctx.number)
    return dq, *dkv, None


_compiled.register_autograd(_compiled_backward, setup_context=_keep)


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
    weight = torch.sigmoid(block_lse - lse).unsqueeze(-1)
    out.lerp_(block_out.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, block_lse))
