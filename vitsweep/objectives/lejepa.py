"""Views of an image to one another, with features that are normally distributed."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Self

from annotated_types import Ge, Gt, Le

from vitsweep.objectives.unlabelled import OfViews

if TYPE_CHECKING:
    from vitsweep.objectives.base import OpenObjective
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class LeJepa(OfViews):
    """The mean square distance of each view's projection to their mean, and SIGReg (arXiv:2511.08544).

    loss = weight x SIGReg + (1 - weight) x mean of (z_v - mean over views of z)^2. SIGReg compares the
    projections of all images of the step, along random directions, with a standard normal distribution
    (Epps-Pulley), view by view. The projector has LayerNorm, where the source has BatchNorm, whose statistics
    would depend on the number of replicas. No teacher.

    Attributes:
        projector_depth: linears of the projector.
        projector_width: size between them.
        projected: size of z.
        directions: unit vectors, drawn anew in each step, the same on all ranks.
        knots: of the integral over [0, 3].
        weight: of SIGReg.
    """

    projector_depth: Annotated[int, Ge(1)]
    projector_width: Annotated[int, Gt(0)]
    projected: Annotated[int, Gt(0)]
    directions: Annotated[int, Gt(0)]
    knots: Annotated[int, Ge(2)]
    weight: Annotated[float, Ge(0), Le(1)]

    def twin(self) -> Self:
        """A narrow projector, few directions, and no small weight: at first, views differ by rounding."""
        return replace(
            self,
            weight=max(0.5, self.weight) if self.weight else 0.0,
            projector_width=min(32, self.projector_width),
            directions=min(3, self.directions),
            knots=min(5, self.knots),
            small_views=min(3, self.small_views),
        )

    def open(self, cell: "CellSpec") -> "OpenObjective":
        """Return what crops, projects and compares."""
        from vitsweep.objectives.sigreg import OpenLeJepa

        return OpenLeJepa(cell)
