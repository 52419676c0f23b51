"""Images to one of several classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.model.flops import train_flops
from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.objective import Objective

if TYPE_CHECKING:
    from vitsweep.objectives.base import OpenObjective
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Classification(Objective):
    """Cross entropy of logits and labels, smoothed as `task.label_smoothing` says (arXiv:1512.00567)."""

    reads_labels: ClassVar[bool] = True
    scores: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        "accuracy_top1": "higher",
        "accuracy_top5": "higher",
    }

    @property
    def is_default(self) -> bool:
        """True for the choice `classification`."""
        return self.name == "classification"

    def train_flops(self, cell: "CellSpec") -> int | None:
        """Return those of the network: the loss has no products."""
        if not isinstance(cell.model, TransformerSpec):
            return None
        pooling, pattern = cell.classifier.pooling, cell.attention.attention_pattern
        return train_flops(cell.transformer, cell.batch.resolution_px, pooling, pattern)

    def open(self, cell: "CellSpec") -> "OpenObjective":
        """Return the cross entropy, or the `model.loss` of a cell from before there were objectives."""
        from vitsweep.objectives.cross_entropy import CrossEntropy, OwnLoss

        return OwnLoss.named_by(cell) if cell.loss_function else CrossEntropy(cell)
