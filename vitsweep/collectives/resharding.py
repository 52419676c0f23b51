"""Split, switch and gather: the three ways to change along which axis a tensor is sharded.

(DSP, arXiv:2403.10266, table 2.) Axes of odd length are padded with zeros at their end; padding is
gone again as soon as an axis is whole.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives import primitives
from vitsweep.collectives.primitives import check_share, exchange_chunks, pad
from vitsweep.spec.model_parallel import padded_share


def split(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Keep this rank's part of `axis`; nothing is sent.

    The gradient of the rest is zero here: it lies on the other ranks, so that gradients of what
    came before have to be summed over the group, like those of all weights in between.
    """
    own = padded_share(x.shape[axis], group.size())
    return pad(x, axis, group.size()).narrow(axis, group.rank() * own, own).contiguous()


def gather(x: Tensor, axis: int, length: int, group: ProcessGroup) -> Tensor:
    """Give every rank the whole of `axis`, `length` long: one all-gather.

    All ranks then compute the same loss. Its gradient is taken `size` times here, so that the
    *mean* over the group of the gradients of any weight, before, within or after the sharded part,
    is the gradient of the loss counted once. Nothing is sent in the backward pass.
    """
    check_share(x, axis, length, group)
    return _Gather.apply(x, axis, group).narrow(axis, 0, length)


def switch(x: Tensor, whole: int, sharded: int, length: int, group: ProcessGroup) -> Tensor:
    """Make axis `whole` whole (`length` long) and shard axis `sharded` instead: one all-to-all.

    Sends (n-1)/n of the local tensor; the backward pass is the reverse switch.
    """
    check_share(x, whole, length, group)
    return _AllToAll.apply(pad(x, sharded, group.size()), sharded, whole, group).narrow(
        whole, 0, length
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group, ctx.own = axis, group, x.shape[axis]
        return primitives.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient.narrow(ctx.axis, ctx.group.rank() * ctx.own, ctx.own)
        return own * ctx.group.size(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, concatenate: int, group: ProcessGroup) -> Tensor:
        ctx.axes, ctx.group = (concatenate, split), group
        return primitives.all_to_all(x, split, concatenate, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        split, concatenate = ctx.axes
        return primitives.all_to_all(gradient, split, concatenate, ctx.group), None, None, None


# Tokens for heads and back: the two all-to-alls around an attention (DeepSpeed-Ulysses, arXiv:2309.14509).
#
# Axes: B images, H heads of all n ranks, h = H/n heads of one, T tokens of one rank, N tokens of all
# without padding, K head width. What is sent is laid out so that what arrives is used as it lies: each
# number is copied once before it is sent, and once more only where heads have to be joined.


Three = tuple[Tensor, Tensor, Tensor]


def to_heads(q: Tensor, k: Tensor, v: Tensor, length: int, group: ProcessGroup) -> Three:
    """Exchange own tokens of all heads for all tokens of own heads, q, k and v in one message.

    Args:
        q: (B, H, T, K), any strides.
        k: the same.
        v: the same.
        length: N.
        group: n ranks with adjacent parts of the tokens, padded at the end of the last; n divides H.

    Returns:
        Three views (B, h, N, K) of one buffer.
    """
    check_share(q, 2, length, group)
    found: Three = _ToHeads.apply(q, k, v, length, group)
    return found


def to_tokens(o: Tensor, group: ProcessGroup, tokens_outermost: bool) -> Tensor:
    """Exchange all tokens of own heads for own tokens of all heads.

    Args:
        o: (B, h, N, K), any strides.
        group: n ranks.
        tokens_outermost: whether the result lies in memory as (T, B, H, K), or else (B, T, H, K).

    Returns:
        (B, H, T, K) whose last heads and widths are one axis in memory.
    """
    tokens: Tensor = _ToTokens.apply(o, group, tokens_outermost)
    return tokens


def lies_tokens_outermost(q_BHTK: Tensor) -> bool:
    """Whether tokens are the outermost axis in memory, as in a batch-second layout."""
    return q_BHTK.stride(2) > q_BHTK.stride(0)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, length: int, group: ProcessGroup
    ) -> Three:
        ctx.group, ctx.tokens_outermost = group, lies_tokens_outermost(q)
        n, (images, heads, tokens, width) = group.size(), q.shape
        chunks = q.new_empty((n, tokens, images, 3, heads // n, width))
        for i, x in enumerate((q, k, v)):
            chunks[:, :, :, i] = x.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4)
        arrived = exchange_chunks(chunks, group).flatten(0, 1)[:length]
        q, k, v = (arrived[:, :, i].permute(1, 2, 0, 3) for i in range(3))
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        chunks = _by_tokens(gradients, ctx.group)
        arrived = exchange_chunks(chunks, ctx.group)
        # In the order of the fused projection, whose gradient joins them in one more copy.
        q, k, v = (_joined_heads(arrived[:, :, :, i], ctx.tokens_outermost) for i in range(3))
        return q, k, v, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, group: ProcessGroup, tokens_outermost: bool) -> Tensor:
        ctx.group, ctx.length = group, o.shape[2]
        arrived = exchange_chunks(_by_tokens((o,), group), group)
        return _joined_heads(arrived[:, :, :, 0], tokens_outermost)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        n, (images, heads, tokens, width) = ctx.group.size(), gradient.shape
        chunks = gradient.new_empty((n, tokens, images, heads // n, width))
        chunks.copy_(gradient.unflatten(1, (n, -1)).permute(1, 3, 0, 2, 4))
        arrived = exchange_chunks(chunks, ctx.group).flatten(0, 1)[: ctx.length]
        return arrived.permute(1, 2, 0, 3), None, None


def _by_tokens(tensors: tuple[Tensor, ...], group: ProcessGroup) -> Tensor:
    """Copy tensors (B, h, N, K) into chunks (n, T, B, tensors, h, K); padding is zero."""
    n, (images, heads, length, width) = group.size(), tensors[0].shape
    padded = n * -(-length // n)
    chunks = tensors[0].new_empty((padded, images, len(tensors), heads, width))
    chunks[length:] = 0
    for i, x in enumerate(tensors):
        chunks[:length, :, i] = x.permute(2, 0, 1, 3)
    return chunks.unflatten(0, (n, -1))


def _joined_heads(arrived: Tensor, tokens_outermost: bool) -> Tensor:
    """(n, T, B, h, K) -> (B, H, T, K), with H K one axis in memory: the one copy after an exchange."""
    order, back = ((1, 2), (1, 2, 0, 3)) if tokens_outermost else ((2, 1), (0, 2, 1, 3))
    return arrived.permute(*order, 0, 3, 4).flatten(2, 3).permute(back)
