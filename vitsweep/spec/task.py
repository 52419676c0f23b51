"""What a cell does with its model: a few measured steps, or training to an accuracy."""

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from vitsweep.spec.identity import added_later


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
