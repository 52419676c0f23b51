"""An all-gather along the tokens, with its gradient (imports torch: `apply` imports this file)."""

import torch
import torch.distributed as dist

from vitsweep.collectives.primitives import sent_as


class AllGather(torch.autograd.Function):
    """(B, H, T/n, K) of each rank -> (B, H, T, K) on all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        """Join the tokens of all ranks in their order."""
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
        ]
        with sent_as("activation"):
            dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        """Sum what all ranks' queries say of a token's key, and keep the own tokens."""
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), 2)]
        own = torch.empty_like(parts[0])
        with sent_as("activation"):
            dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None
