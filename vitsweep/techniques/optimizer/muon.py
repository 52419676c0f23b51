"""Muon: orthogonalized momentum for the matrices of the blocks, AdamW for everything else."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Muon(OptimizerChoice):
    """torch.optim.Muon (kellerjordan.github.io/posts/muon) with q, k and v as matrices of their own.

    The momentum of a matrix is replaced by the nearest orthogonal matrix, by Newton-Schulz
    iterations in bfloat16, which is matrix products instead of AdamW's element-wise update. Updates
    are scaled to the size of AdamW's, so that its learning rate and weight decay can be kept (Liu et
    al., arXiv:2502.16982, section 2.2). Embeddings, norms, biases and the head are AdamW's (fused).
    One moment per matrix instead of two.

    Attributes:
        momentum: decay of the velocity of matrices.
        nesterov: look ahead.
        iterations: of Newton-Schulz.
        beta1: of AdamW, for all else.
        beta2: of AdamW.
        eps: of AdamW.
    """

    momentum: Annotated[float, Ge(0), Lt(1)]
    nesterov: bool
    iterations: Annotated[int, Gt(0), Lt(100)]
    beta1: Annotated[float, Ge(0), Lt(1)]
    beta2: Annotated[float, Ge(0), Lt(1)]
    eps: Annotated[float, Gt(0)]
    needs_transformer: ClassVar[bool] = True  # filters of convolutions are no matrices

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return both optimizers as one."""
        from vitsweep.techniques.optimizer.muon_with_adamw import MuonWithAdamW

        muon = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.iterations}
        adamw = {"betas": (self.beta1, self.beta2), "eps": self.eps, "fused": True}
        return MuonWithAdamW(groups, self.learning_rate, muon, adamw)

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse what leaves a rank with parts of matrices."""
        if cell.sharding.shards_parameters or cell.sharding.shards_optimizer:
            yield (
                f"`optimizer={self.name}` orthogonalizes whole matrices, of which "
                f"`sharding={cell.sharding.name}` lets a rank update a slice: use `sharding=ddp`, or "
                "`optimizer=adamw_fused`."
            )
        if cell.mesh.tensor > 1:
            yield (
                f"`optimizer={self.name}` orthogonalizes whole matrices, which `mesh.tensor="
                f"{cell.mesh.tensor}` splits over ranks: use `mesh.tensor=1`, or "
                "`optimizer=adamw_fused`."
            )
