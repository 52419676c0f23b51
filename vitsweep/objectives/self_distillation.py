"""Views of an image to what a moving average of the network says of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le

from vitsweep.objectives.unlabelled import OfViews
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.objective import Pass

if TYPE_CHECKING:
    from vitsweep.objectives.base import OpenObjective
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class SelfDistillation(OfViews):
    """DINO, iBOT and KoLeo (DINOv2, arXiv:2304.07193; heads as DINOv3's).

    A teacher, the moving average of the weights, sees the large views, the student all. The student's shares
    of prototypes for a view are compared with the teacher's for each other large view (DINO), and those for
    masked patches of one of the two large views of an image with the teacher's for the same patches (iBOT).
    The teacher's shares are made equally frequent over the images of all replicas (Sinkhorn-Knopp). Class
    tokens of large views are pushed apart (KoLeo), over all replicas too: within a rank it would depend on
    their number. A masked view has at most half of its patches masked.

    Attributes:
        prototypes: of each of the two heads, for class tokens and for patches.
        head_width: between the three linears of a head.
        bottleneck: before the prototypes, normalised to length 1.
        student_temperature: of the student's softmax.
        teacher_temperature: of the teacher's at first.
        last_temperature: of the teacher's after `warmup_epochs`, to which it rises linearly.
        warmup_epochs: of that.
        sinkhorn_iterations: 0 for a softmax, which collapses.
        momentum: of the teacher at first, half a cosine to 1 at the end; in `task=measure` it stays.
        least_masked: share of the patches of a masked view, at least.
        most_masked: at most.
        ibot_weight: of masked patches, where DINO's is 1.
        koleo_weight: of each of the two large views.
    """

    scores: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        **OfViews.scores,
        "prototype_information": "higher",
    }

    prototypes: Annotated[int, Gt(1)]
    head_width: Annotated[int, Gt(0)]
    bottleneck: Annotated[int, Gt(0)]
    student_temperature: Annotated[float, Gt(0)]
    teacher_temperature: Annotated[float, Gt(0)]
    last_temperature: Annotated[float, Gt(0)]
    warmup_epochs: Annotated[float, Ge(0)]
    sinkhorn_iterations: Annotated[int, Ge(0)]
    momentum: Annotated[float, Ge(0), Le(1)]
    least_masked: Annotated[float, Gt(0), Le(0.5)]
    most_masked: Annotated[float, Gt(0), Le(0.5)]
    ibot_weight: Annotated[float, Ge(0)]
    koleo_weight: Annotated[float, Ge(0)]

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what keeps averages of its own, and images without patches to mask."""
        yield from super().conflicts(cell)
        typed = f"`objective={self.name}`"
        if cell.averaging.name != "none":
            yield (
                f"`averaging={cell.averaging.name}` averages the weights, and so does the teacher of "
                f"{typed}, by which it is evaluated: use `averaging=none`."
            )
        if self.least_masked > self.most_masked:
            yield (
                f"`objective.least_masked={self.least_masked:g}` is more than `objective.most_masked="
                f"{self.most_masked:g}`: use less."
            )
        if (
            isinstance(cell.model, ViTSpec)
            and cell.model.num_patches(cell.batch.resolution_px) == 1
        ):
            yield (
                f"`model.patch_px={cell.model.patch_px}` makes one patch of an image, and {typed} masks up "
                "to half of them: use smaller patches."
            )

    def passes(self, cell: "CellSpec") -> tuple[Pass, ...]:
        """Those of the student, then the teacher's."""
        large, small = super().passes(cell)
        return large, small, replace(large, trained=False)

    def twin(self) -> Self:
        """Narrow heads with few prototypes."""
        return replace(
            self,
            prototypes=min(12, self.prototypes),
            head_width=min(32, self.head_width),
            bottleneck=min(16, self.bottleneck),
            small_views=min(2, self.small_views),
        )

    def open(self, cell: "CellSpec") -> "OpenObjective":
        """Return what crops, masks and compares."""
        from vitsweep.objectives.prototypes import OpenDistillation

        return OpenDistillation(cell)
