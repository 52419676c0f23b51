"""From a cell to its plain model, before any technique wraps it."""

from typing import TYPE_CHECKING

from torch import nn

from vitsweep.model.multidim import MultiDimViT
from vitsweep.model.resnet import ResNet
from vitsweep.model.vit import ViT
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.multidim_spec import MultiDimSpec
from vitsweep.spec.resnet_spec import ResNetSpec

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


def build_model(cell: "CellSpec") -> nn.Module:
    """Build the model that `cell` trains; on torch's default device, in its default dtype.

    On `meta` it has shapes and no weights, until `model.initialize.materialize` draws them.
    """
    if isinstance(cell.model, MultiDimSpec):
        return MultiDimViT(cell.model, resolution_px=cell.batch.resolution_px)
    if isinstance(cell.model, ResNetSpec):
        return ResNet(cell.model, channels_last=cell.layout.channels_last)
    assert isinstance(cell.model, ViTSpec)
    return ViT(
        cell.model,
        resolution_px=cell.batch.resolution_px,
        pooling=cell.classifier.pooling,
        batch_first=cell.layout.batch_first,
        channels_last=cell.layout.channels_last,
    )
