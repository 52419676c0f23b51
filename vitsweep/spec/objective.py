"""What a model is trained for: a choice of the group `objective`, without torch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Equal forward passes of a step.

    Attributes:
        tokens: of one view, as the blocks see them.
        views: of each image of the data set.
        trained: with a backward pass.
    """

    tokens: int
    views: int = 1
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """What a model is trained for; its fields are settings, which all enter a cell's id.

    It is a part of a cell like `data`: a baseline has the objective of its cell. What gives equal numbers
    in another way is a technique and never a field of an objective, since it could not be compared.

    Modules that hold one import torch inside of `open` only, as those of techniques do.
    """

    name: str

    scores: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {}
    """Columns of the evaluation on held-out images -> which values are better; the first is the main one."""
    draws: ClassVar[bool] = False
    """Whether `prepare` draws random numbers."""
    couples_images: ClassVar[bool] = False
    """True where the loss of an image depends on the other images of the step."""
    gives_context: ClassVar[bool] = False
    """True where `prepare` gives a time and conditions, which networks of diffusion read."""
    reads_labels: ClassVar[bool] = False
    """True where the loss reads one label of each image, which a recipe can smooth and mix."""

    @property
    def title(self) -> str:
        """The name in tables: as typed, or of a function of the user's."""
        return self.name

    @property
    def is_default(self) -> bool:
        """Whether all cells had it before there was a group `objective`: ids and rows leave it out."""
        return False

    @property
    def code_modules(self) -> tuple[str, ...]:
        """Modules outside of vitsweep that compute the loss, for the hash of the code."""
        return ()

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Yield one full sentence for each reason why `cell` cannot be trained for it.

        Overridden methods yield from this one too: it refuses what holds for all of a kind.
        """
        if self.gives_context and not cell.model.has_context:
            yield (
                f"`objective={self.name}` needs a model that reads a time, and `model={cell.model.name}` "
                "reads images alone: use a `dit_*` for images, a `stdit_*` for videos, or with a model "
                "of your own a loss of your own, `objective=module objective.target=...`."
            )
        if cell.model.has_context and not self.gives_context:
            yield (
                f"`model={cell.model.name}` reads a time and conditions, and `objective={self.name}` "
                "gives none: use `objective=flow_matching`, or another model."
            )
        typed, parts = f"`objective={self.name}`", cell.batch.accumulation_steps
        if not self.reads_labels and cell.task.label_smoothing:
            yield (
                f"`task.label_smoothing={cell.task.label_smoothing:g}` is part of the cross entropy, and "
                f"{typed} has another loss: use `task.label_smoothing=0`."
            )
        if not self.reads_labels and cell.task.epochs and cell.recipe.mixes:
            yield (
                f"`recipe={cell.recipe.name}` mixes images and labels for the cross entropy, and {typed} has "
                "another loss: use `recipe.mixup_alpha=0 recipe.cutmix_alpha=0`."
            )
        has_accuracy = self.reads_labels or "accuracy_top1" in self.scores
        if cell.task.target_accuracy is not None and not has_accuracy:
            yield (
                f"`task.target_accuracy={cell.task.target_accuracy:g}` is a top-1 accuracy, and {typed} has "
                "none: leave it out."
            )
        if not self.reads_labels:
            yield from self._cut_into_parts(cell)
        if self.couples_images and parts > 1:
            yield (
                f"`batch.accumulation_steps={parts}` computes the loss of a batch in parts, and that of "
                f"{typed} depends on all of its images together: use `batch.accumulation_steps=1`."
            )

    def _cut_into_parts(self, cell: "CellSpec") -> Iterator[str]:
        if cell.mesh.pipeline > 1:
            yield (
                f"`pipeline_parallel={cell.pipeline_parallel.name}` sends images through the stages, and "
                f"labels to the last one alone; `objective={self.name}` needs more: use "
                "`pipeline_parallel=none`."
            )

    def twin(self) -> Self:
        """Return it in small, for the proof: fewer prototypes, narrower heads."""
        return self

    def loaded_px(self, cell: "CellSpec") -> int | None:
        """Return the side of whole, centred images that it cuts itself; None for a loader's random cuts."""
        return None

    def passes(self, cell: "CellSpec") -> tuple[Pass, ...]:
        """Return the forward passes of a step over one image of the data set."""
        return (Pass(tokens=cell.num_tokens or 0),)

    def tokens_per_image(self, cell: "CellSpec") -> int:
        """Return how many tokens of one image of the data set are trained; 0 of a model without tokens."""
        return sum(each.views * each.tokens for each in self.passes(cell) if each.trained)

    def train_flops(self, cell: "CellSpec") -> int | None:
        """Return the FLOPs of one image of the data set over all passes, by a formula; None without one.

        They are counted in a pass without values then.
        """
        return None

    @abstractmethod
    def open(self, cell: "CellSpec") -> Any:
        """Return what computes it for a cell, an `objectives.base.OpenObjective` (needs torch)."""
