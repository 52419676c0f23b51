"""Handing on the states of linear attention (needs torch).

A rank needs before_r = sum over earlier ranks s of d^(tokens in between) S_s. The gradient of S_r
is the same sum over later ranks: the same way back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives import primitives
from vitsweep.collectives.primitives import check_share, sent_as, unpadded_length
from vitsweep.model.attention import Attend
from vitsweep.model.linear_attention import LinearAttend, causal_mean, features, state
from vitsweep.spec.model_parallel import padded_share


def by_states(attend: LinearAttend, num_tokens: int, group: ProcessGroup, *, chain: bool) -> Attend:
    """Return an `attend` on this rank's tokens that exchanges states.

    Args:
        attend: linear attention on whole images.
        num_tokens: over all ranks, without padding.
        group: ranks with adjacent parts of the tokens.
        chain: pass states from rank to rank (LASP) instead of gathering all (LASP-2).
    """
    own, decay = padded_share(num_tokens, group.size()), attend.decay
    first = group.rank() * own

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sums: Any = _Chain if chain else _Gathered
        before = sums.apply(state(k, v, decay), decay**own, group)
        return causal_mean(q, k, v, decay, first, before)

    def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = unpadded_length(num_tokens, own, group.rank())  # keys of padding must not count
        whole = _Total.apply(state(k[:, :, :tokens], v[:, :, :tokens], 1), group)
        return q @ (whole / num_tokens).to(q.dtype)

    def exchanged(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        check_share(q_BHTK, 2, num_tokens, group)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            compute = causal if attend.is_causal else bidirectional
            return compute(*features(q_BHTK, k_BHTK, v_BHTK))

    return exchanged


class _Chain(torch.autograd.Function):
    """LASP (arXiv:2404.02882, algorithm 2): receive, add own state, send on; n - 1 hops in a row."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, decay: float, group: ProcessGroup) -> Tensor:
        ctx.chain = decay, group
        return _along_chain(own, decay, group, step=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        decay, group = ctx.chain
        return _along_chain(gradient, decay, group, step=-1), None, None


def _along_chain(own: Tensor, decay: float, group: ProcessGroup, step: int) -> Tensor:
    before = torch.zeros_like(own, memory_format=torch.contiguous_format)
    earlier, later = group.rank() - step, group.rank() + step
    with sent_as("activation"):
        if 0 <= earlier < group.size():
            _wait_for(dist.irecv, before, earlier, group)
        if 0 <= later < group.size():
            _wait_for(dist.isend, (before * decay + own).contiguous(), later, group)
    return before


def _wait_for(operation: Any, tensor: Tensor, rank: int, group: ProcessGroup) -> None:
    """Send or receive; a batch of one is what Dynamo takes into a graph."""
    peer = dist.get_global_rank(group, rank)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()


class _Gathered(torch.autograd.Function):
    """LASP-2 (arXiv:2502.07563, algorithm 2): one all-gather of states, sums on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, decay: float, group: ProcessGroup) -> Tensor:
        ctx.decay, ctx.group = decay, group
        rank = group.rank()
        return _weighted(own, group, [(s, decay ** (rank - 1 - s)) for s in range(rank)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rank, size = ctx.group.rank(), ctx.group.size()
        later = [(s, ctx.decay ** (s - 1 - rank)) for s in range(rank + 1, size)]
        return _weighted(gradient, ctx.group, later), None, None


class _Total(torch.autograd.Function):
    """LASP-2 without a mask (algorithm 1): every rank needs the sum of all states."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _weighted(own, group, [(s, 1.0) for s in range(group.size())])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _weighted(gradient, ctx.group, [(s, 1.0) for s in range(ctx.group.size())]), None


def _weighted(own: Tensor, group: ProcessGroup, terms: list[tuple[int, float]]) -> Tensor:
    gathered = primitives.all_gather(own.unsqueeze(0), 0, group)
    total = torch.zeros_like(own)
    for rank, weight in terms:
        total += gathered[rank] * weight
    return total
