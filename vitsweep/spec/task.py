"""What a cell does with its model: a few measured steps, or training to an accuracy."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le


@dataclass(frozen=True, kw_only=True)
class Task:
    """`measure` (epochs=0: only the steps of `measurement`) or `train` (epochs > 0).

    Attributes:
        epochs: passes over the training images after the measured steps; 0 trains no further.
        warmup_epochs: epochs of linear learning-rate warm-up, then half a cosine to zero.
        label_smoothing: epsilon of the smoothed cross entropy (Szegedy et al., arXiv:1512.00567).
    """

    name: str
    epochs: Annotated[int, Ge(0)]
    warmup_epochs: Annotated[float, Ge(0)]
    label_smoothing: Annotated[float, Ge(0), Le(1)]
