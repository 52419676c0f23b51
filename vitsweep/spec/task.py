"""What a cell does with its model: a few measured steps, or training to an accuracy."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from vitsweep.spec.identity import added_later

WITHOUT_EFFECT = {
    "evaluate_every_epochs": 1, "target_accuracy": None, "checkpoint_minutes": 10.0,
}  # fmt: skip
"""Settings that nothing reads without a training, as `task=measure` has them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`measure` (epochs=0: only the steps of `measurement`) or `train` (epochs > 0).

    Attributes:
        epochs: passes over the training images after the measured steps; 0 trains no further.
        warmup_epochs: epochs of linear learning-rate warm-up, then half a cosine to zero.
        label_smoothing: epsilon of the smoothed cross entropy (Szegedy et al., arXiv:1512.00567).
        evaluate_every_epochs: epochs between evaluations; 0 evaluates the trained model only.
        target_accuracy: top-1 whose time is recorded in `seconds_to_target`; None for no target.
        checkpoint_minutes: time between two checkpoints; None writes one only when interrupted.
        resume_from: folder of a checkpoint of another cell (see `training.course.checkpoints_in`), from which
            the training goes on; its ranks, mesh, sharding and precision may be others.
    """

    name: str
    epochs: Annotated[int, Ge(0)]
    warmup_epochs: Annotated[float, Ge(0)]
    label_smoothing: Annotated[float, Ge(0), Le(1)]
    evaluate_every_epochs: Annotated[int, Ge(0)] = field(metadata=added_later(1))
    target_accuracy: Annotated[float, Gt(0), Le(1)] | None = field(metadata=added_later(None))
    checkpoint_minutes: Annotated[float, Gt(0)] | None = field(
        metadata=added_later(10.0) | {"identity": False}
    )
    resume_from: str | None = field(metadata=added_later(None))

    def conflicts(self) -> Iterator[str]:
        """Yield which settings of a training have no effect, where there is none, and where epochs are."""
        if self.name == "measure" and self.epochs:
            yield (
                f"`task.epochs={self.epochs}` has no effect with `task=measure`, which does not train: use "
                f"`task=train task.epochs={self.epochs}`."
            )
        if self.name == "train" and not self.epochs:
            yield "`task=train` with `task.epochs=0` trains nothing: use `task=measure`."
        if self.epochs:
            return
        for key, default in WITHOUT_EFFECT.items():
            value = getattr(self, key)
            if value != default:
                shown = "null" if value is None else f"{value:g}"
                yield (
                    f"`task.{key}={shown}` has no effect with `task={self.name}`, which does not train: "
                    "use `task=train`, or leave it out."
                )

    def doubts(self) -> Iterator[str]:
        """Yield what is possible, and probably not meant."""
        if 0 < self.epochs <= self.warmup_epochs:
            yield (
                f"`task.warmup_epochs={self.warmup_epochs:g}` is not shorter than "
                f"`task.epochs={self.epochs}`: the learning rate never reaches its peak. Give a shorter "
                f"one, as `task.warmup_epochs={self.epochs / 6:.2g}`."
            )
        if self.target_accuracy is not None and self.epochs > 1:
            every = self.evaluate_every_epochs
            if not every or every >= self.epochs:
                yield (
                    f"`task.evaluate_every_epochs={every}` evaluates the trained model only: the time to "
                    f"`task.target_accuracy={self.target_accuracy:g}` can only be that of all "
                    f"`task.epochs={self.epochs}`."
                )
