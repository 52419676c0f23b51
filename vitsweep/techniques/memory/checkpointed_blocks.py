"""Checkpointed blocks (needs torch; imported when applied)."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vitsweep.model.block import is_marked

aten = torch.ops.aten

LINEARS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}


def _flex_attention() -> set[Any]:
    """Return torch's (private) operation of flex attention; without it that is computed again."""
    try:
        from torch._higher_order_ops.flex_attention import flex_attention
    except ImportError:
        return set()
    return {flex_attention}


OPERATIONS: dict[str, set[Any]] = {
    "linear": LINEARS,
    "attention": {
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        *_flex_attention(),
    },
    "norm": {aten.native_layer_norm.default},
    "activation": {aten.gelu.default, aten.silu.default},
}
"""Kind -> operations whose results can be kept; all others take little time and are computed again."""


class RecomputedBlock(nn.Module):
    """A block under a non-reentrant checkpoint.

    The class of a block is swapped rather than a wrapper put around it: module and parameters keep
    their names, hooks of sharding, which gather parameters, run outside the checkpoint, and
    torch.compile sees a plain method (it would pass over a `forward` set on the instance).
    """

    options: ClassVar[dict[str, Any]] = {}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Transform the inputs, keeping them alone."""
        return checkpoint(
            super().forward,
            *inputs,
            use_reentrant=False,
            # Our blocks have no dropout, and saving the state of the random generator takes time.
            preserve_rng_state=is_marked(self),
            **self.options,
            **named,
        )


@cache
def block_that_keeps(kinds: frozenset[str]) -> type[RecomputedBlock]:
    """Return a block under a checkpoint that keeps the results of some kinds of operations.

    Equal kinds give the same class, whose blocks share one compilation.
    """
    kept = {operation for kind in kinds for operation in OPERATIONS[kind]}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in kept and not _narrows(operation, args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    return type(
        "SelectivelyRecomputedBlock", (RecomputedBlock,), {"options": {"context_fn": contexts}}
    )


def _narrows(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a linear with fewer outputs than inputs: `mlp.down`, the end of a block.

    Nothing in the backward pass reads its output, and recomputation stops before it.
    """
    if operation not in LINEARS or operation is aten._scaled_mm.default:
        return False
    inputs, outputs = args[-1].shape
    return outputs < inputs
