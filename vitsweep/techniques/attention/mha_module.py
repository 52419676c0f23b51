"""`nn.MultiheadAttention` as it computed in 2022."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.technique import AttentionKernel

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class MhaModule(AttentionKernel):
    """The module that pycls used: batched product, softmax, batched product, scores kept.

    It holds the parameters of the attention it replaces. Their names change (`attention.qkv.weight`
    becomes `attention.in_proj_weight`); `model.initialize.plain_name` translates back.
    """

    # `conflicts` below refuses all sequence parallelism: one reason is enough
    ring_computes_the_same: ClassVar[bool] = True
    recomputes_scores: ClassVar[bool] = False  # the scores are kept

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what replaces `nn.Linear` modules: this module reads their weights only."""
        split = [g for g in ("tensor_parallel", "sequence_parallel") if getattr(cell, g).axes]
        for group in [*split, *["precision"] * cell.precision.float8]:
            yield (
                f"`attention={self.name}` cannot run with `{group}={getattr(cell, group).name}`: "
                "nn.MultiheadAttention has neither linears to split or convert nor a kernel to replace. "
                "Use `attention=sdpa_math`, which computes the same way."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Replace every attention by a module with the same parameters."""
        from vitsweep.techniques.attention.kernels import replace_attention

        return replace_attention(model)
