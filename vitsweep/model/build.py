"""From a cell to its plain model, before any technique wraps it."""

from typing import TYPE_CHECKING

from vitsweep.model.vit import ViT

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


def build_model(cell: "CellSpec") -> ViT:
    """Build the model that `cell` trains; on torch's default device, in its default dtype."""
    return ViT(
        cell.model,
        resolution_px=cell.batch.resolution_px,
        pooling=cell.classifier.pooling,
        batch_first=cell.layout.batch_first,
        channels_last=cell.layout.channels_last,
    )
