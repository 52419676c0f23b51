"""Every epoch alike, or small images and few patches first."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.model_variant import EpochSize, Schedule

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

ROUNDING = 1e-9
COMPILED_STAGES = 6
"""torch.compile compiles a block for at most 8 shapes (`recompile_limit`), training and evaluation."""


@dataclass(frozen=True, kw_only=True)
class Progressive(Schedule):
    """Images and shares of patches that grow in equal stages over the first epochs.

    Progressive resolution after Tan and Le (arXiv:2104.00298, section 4.2), token share after
    PatchDropout (Liu et al., arXiv:2208.07220). The position embedding keeps its size; at a smaller
    resolution its grid is resized in the forward pass, so that gradients reach all of it. The loader
    reads images of `batch.resolution_px`, which are made smaller on the device. Evaluation and the timed
    steps are of full size. FLOPs and activations of an epoch shrink with its tokens; parameters,
    optimizer state and bytes sent do not.

    Attributes:
        first_resolution_share: side of the images of the first epoch, as a share of
            `batch.resolution_px`, rounded to whole patches.
        first_keep: share of the patches that go through the blocks in the first epoch, drawn anew for
            each image.
        growth_epochs: share of the epochs before the first one of full size.
        stages: sizes of these epochs, besides the full one (4 in arXiv:2104.00298 with it). Each is
            compiled for itself.
    """

    first_resolution_share: Annotated[float, Gt(0), Le(1)]
    first_keep: Annotated[float, Gt(0), Le(1)]
    growth_epochs: Annotated[float, Gt(0), Le(1)]
    stages: Annotated[int, Gt(0)]

    changes_sizes: ClassVar[bool] = True
    needs_transformer: ClassVar[bool] = True  # it works on patches

    def size(self, cell: "CellSpec", epoch: int) -> EpochSize:
        """Return the size of an epoch, counted from 0."""
        smaller_epochs = self.growth_epochs * max(1, cell.task.epochs)
        stage = floor(epoch * self.stages / smaller_epochs + ROUNDING)
        done = min(1.0, stage / self.stages)
        patch, full = cell.transformer.patch_px, cell.batch.resolution_px
        share = self.first_resolution_share + (1 - self.first_resolution_share) * done
        return EpochSize(
            resolution_px=max(patch, round(share * full / patch) * patch),
            keep=self.first_keep + (1 - self.first_keep) * done,
        )

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what needs one number of tokens, or knows its patches by their place."""
        me = f"schedule={self.name}"
        if not cell.task.epochs:
            yield (
                f"`{me}` has no effect with `task={cell.task.name}`, whose steps all have one size: use "
                "`task=train`, or `schedule=constant`."
            )
            return
        spec = cell.model
        if not isinstance(spec, ViTSpec) or spec.head == "dense" or spec.tokens_per_channel:
            yield (
                f"`{me}` resizes one grid of positions and the images of a classifier, which "
                f"`model={spec.name}` with `model.head={spec.head}` is not: use a `vit_*` with "
                "`model.head=classify` and `model.tokens_per_channel=false`, or `schedule=constant`."
            )
            return
        yield from self._growth_conflicts(cell, spec)
        yield from self._technique_conflicts(cell, spec, me)

    def _growth_conflicts(self, cell: "CellSpec", spec: ViTSpec) -> Iterator[str]:
        last = self.size(cell, cell.task.epochs - 1)
        if self.size(cell, 0) == EpochSize(cell.batch.resolution_px, 1.0):
            yield (
                f"`schedule.first_resolution_share={self.first_resolution_share:g}` of "
                f"{cell.batch.resolution_px} px in patches of {spec.patch_px} px and "
                f"`schedule.first_keep={self.first_keep:g}` make no epoch smaller: lower one of them, or "
                "use `schedule=constant`."
            )
        if last != EpochSize(cell.batch.resolution_px, 1.0):
            # rounded up it would be too much
            fits = floor(1000 * (1 - 1 / cell.task.epochs)) / 1000
            way_out = (
                f"at most `schedule.growth_epochs={fits:.3g}`"
                if fits
                else "`task.epochs=2` or more"
            )
            yield (
                f"`schedule.growth_epochs={self.growth_epochs:g}` of `task.epochs={cell.task.epochs}` "
                f"leaves no epoch of full size at the end, which is what is evaluated: use {way_out}."
            )
        patches = spec.num_patches(self.size(cell, 0).resolution_px)
        if round(patches * self.first_keep) == 0:
            yield (
                f"`schedule.first_keep={self.first_keep:g}` of the {patches} patches of the first epoch "
                f"leaves no token: use at least `schedule.first_keep={-(-1000 // patches) / 1000:g}`."
            )

    def _technique_conflicts(self, cell: "CellSpec", spec: ViTSpec, me: str) -> Iterator[str]:
        if spec.position == "rotary":
            yield (
                f"`{me}` resizes learned positions, and `model.position=rotary` has a table for one grid: "
                "use `model.position=learned`, or `schedule=constant`."
            )
        if self.first_keep < 1 and cell.tokens.draws:
            yield (
                f"`schedule.first_keep={self.first_keep:g}` and `tokens={cell.tokens.name}` both drop "
                "patches: use `tokens=all`, or `schedule.first_keep=1`."
            )
        for group in ("sequence_parallel", "pipeline_parallel"):
            choice = getattr(cell, group).name
            if choice != "none":
                yield (
                    f"`{me}` changes the number of tokens, and `{group}={choice}` is set up for one: use "
                    f"`{group}=none`, or `schedule=constant`."
                )
        if cell.precision.float8:
            yield (
                f"`{me}` changes the number of tokens, and `precision={cell.precision.name}` needs products "
                "whose number of rows is divisible by 16: use `precision=bf16`."
            )
        if cell.compilation.captures_step:
            yield (
                f"`{me}` changes the size of a step, and `compilation={cell.compilation.name}` replays one "
                "recorded step: use another `compilation`, or `schedule=constant`."
            )
        if cell.compilation.scope != "nothing" and self.stages > COMPILED_STAGES:
            yield (
                f"`schedule.stages={self.stages}` gives as many sizes, and `compilation="
                f"{cell.compilation.name}` compiles each until torch's limit: use at most "
                f"`schedule.stages={COMPILED_STAGES}`."
            )
        if self.first_keep < 1 and cell.compilation.scope == "model":
            yield (
                f"`schedule.first_keep={self.first_keep:g}` draws patches from a generator of its own, which "
                f"`compilation={cell.compilation.name}` cannot hold in its graph: use "
                "`compilation=compile_blocks`, or `schedule.first_keep=1`."
            )
