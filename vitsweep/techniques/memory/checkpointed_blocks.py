"""Checkpointed blocks (needs torch; imported when applied)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from vitsweep.model.block import is_marked, swap_block_class

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
        options = self.options
        # A compiled graph writes running statistics once by itself.
        if is_marked(self) and not torch.compiler.is_compiling():
            options = {"context_fn": lambda: self._contexts(**self.options)}
        return checkpoint(
            super().forward,
            *inputs,
            use_reentrant=False,
            # Our blocks have no dropout, and saving the state of the random generator takes time.
            preserve_rng_state=is_marked(self),
            **options,
            **named,
        )

    def _contexts(
        self, context_fn: Callable[[], Any] = lambda: (nullcontext(), nullcontext())
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward pass and of its repetition, which moves no statistics."""
        first, again = context_fn()
        norms = [m for m in self.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        return (first, _both(_statistics_kept(norms), again)) if norms else (first, again)


@contextmanager
def _both(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _statistics_kept(norms: list[_NormBase]) -> Iterator[None]:
    """Let norms move copies of their running statistics: without any they would save other tensors."""
    statistics = [dict(norm._buffers) for norm in norms]
    for norm, own in zip(norms, statistics, strict=True):
        norm._buffers.update({name: None if b is None else b.clone() for name, b in own.items()})
    try:
        yield
    finally:
        for norm, own in zip(norms, statistics, strict=True):
            norm._buffers.update(own)


def recomputed(model: nn.Module, keep: frozenset[str] | None = None) -> nn.Module:
    """Run every block under a checkpoint, which keeps the results of some kinds of operations."""
    return swap_block_class(model, RecomputedBlock if keep is None else block_that_keeps(keep))


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
