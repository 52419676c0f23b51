"""Attention and MLP side by side, from one norm."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.model_variant import BlockVariant

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class ParallelBranches(BlockVariant):
    """y = x + attention(norm(x)) + MLP(norm(x)) (ViT-22B, arXiv:2302.05442, section 2).

    One norm less per block, and two products that do not wait for one another. Of ViT-22B's other
    changes (norms of q and k, no biases of q, k, v and norms) none is made. Products are not joined:
    tensor parallelism sums each branch for itself. Another model than a ViT.
    """

    changes_model: ClassVar[bool] = True

    def shape(self, spec: TransformerSpec, cell: "CellSpec") -> TransformerSpec:
        """Return the shape without the second norm of each block."""
        return replace(spec, parallel_branches=True)

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Let both branches of every block read the first norm, and drop the second one."""
        from vitsweep.techniques.vit_block.branches import with_parallel_branches

        return with_parallel_branches(model)

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Write the sum into every block."""
        from vitsweep.model.block import blocks_of

        for block in blocks_of(model):
            block.norm_mlp = None  # type: ignore[assignment]
            vars(block)["forward"] = partial(_sum_of_branches, block)
        return model


def _sum_of_branches(block: Any, x: "Tensor", context: None = None) -> "Tensor":
    normed = block.norm_attention(x)
    attended, transformed = block.attention(normed), block.mlp(normed)
    if block.scale_mlp is not None:
        attended, transformed = attended * block.scale_attention, transformed * block.scale_mlp
    return x + attended + transformed
