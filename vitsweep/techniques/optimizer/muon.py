"""Muon: orthogonalized momentum for the matrices of the blocks, AdamW for everything else."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice

if TYPE_CHECKING:
    from torch.optim import Optimizer


ORTHOGONAL = 0.1
"""Relative distance that bfloat16, in which Muon iterates, leaves between sums of orthogonal matrices."""


@dataclass(frozen=True, kw_only=True)
class Muon(OptimizerChoice):
    """torch.optim.Muon (kellerjordan.github.io/posts/muon) with q, k and v as matrices of their own.

    The momentum of a matrix is replaced by the nearest orthogonal matrix, by Newton-Schulz
    iterations in bfloat16, which is matrix products instead of AdamW's element-wise update. Updates
    are scaled to the size of AdamW's, so that its learning rate and weight decay can be kept (Liu et
    al., arXiv:2502.16982, section 2.2). Embeddings, norms, biases and the head are AdamW's (fused).
    One moment per matrix instead of two. Matrices of one shape go together; parts of sharded ones are
    sent to a rank that owns the matrix, and back.

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

    @property
    def updates_shards(self) -> bool:
        """It gathers each matrix on a rank that owns it."""
        return True

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return both optimizers as one."""
        from vitsweep.techniques.optimizer.muon_with_adamw import MuonWithAdamW

        return MuonWithAdamW(groups, self.learning_rate, **self.muon(), adamw=self.adamw())

    def plain(self) -> "Muon":
        """Return torch's Muon, one whole matrix after the other."""
        return _PlainMuon(**{field.name: getattr(self, field.name) for field in fields(Muon)})

    def muon(self) -> dict[str, Any]:
        """Return what is set of Muon."""
        keys = ("momentum", "nesterov", "iterations")
        return {key: getattr(self, key) for key in keys}

    def adamw(self) -> dict[str, Any]:
        """Return what is set of AdamW."""
        return {"betas": (self.beta1, self.beta2), "eps": self.eps, "fused": True}

    def relative_tolerance(self) -> float:
        """Iterations in bfloat16 of which a device rounds sums in another order, batched or not."""
        return ORTHOGONAL / 15

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse tensor parallelism, which leaves a rank with columns of matrices."""
        if cell.mesh.tensor > 1:
            yield (
                f"`optimizer={self.name}` orthogonalizes whole matrices, which `mesh.tensor="
                f"{cell.mesh.tensor}` splits over ranks: use `mesh.tensor=1`, or "
                "`optimizer=adamw_fused`."
            )


class _PlainMuon(Muon):
    """The same by `torch.optim.Muon`."""

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return both optimizers as one, over whole parameters."""
        from vitsweep.techniques.optimizer.torch_muon import TorchMuonWithAdamW

        return TorchMuonWithAdamW(groups, self.learning_rate, **self.muon(), adamw=self.adamw())
