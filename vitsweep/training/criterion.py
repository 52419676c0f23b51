"""The loss that a cell minimises."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from vitsweep.spec.cell_spec import CellSpec


def criterion_of(cell: CellSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (outputs, labels) -> mean loss, in float32 or better."""

    def criterion(outputs: Tensor, labels: Tensor) -> Tensor:
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if cell.model.head == "dense":
            return F.mse_loss(outputs, labels.to(outputs.dtype))
        return F.cross_entropy(outputs, labels, label_smoothing=cell.task.label_smoothing)

    return criterion
