"""From a cell to its reference model, before any technique wraps it."""

import torch
from torch import nn

from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import build_module, look_of
from vitsweep.model.vit import MultiDimViT, ViT
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import MultiDimSpec, ViTSpec


def build_model(cell: "CellSpec") -> nn.Module:
    """Build the model that `cell` trains; on torch's default device, in its default dtype.

    On `meta` it has shapes and no weights, until `model.initialize.materialize` draws them.
    """
    shape = cell.shape
    if isinstance(shape, ModuleSpec):
        return build_module(shape, cell.batch.resolution_px)
    if isinstance(shape, MultiDimSpec):
        return MultiDimViT(shape, resolution_px=cell.batch.resolution_px)
    assert isinstance(shape, ViTSpec)
    return ViT(
        shape,
        resolution_px=cell.batch.resolution_px,
        pooling=cell.classifier.pooling,
        batch_first=cell.layout.batch_first,
        channels_last=cell.layout.channels_last,
        linear_patches=cell.layout.patch_embedding == "linear",
    )


def first_model(cell: "CellSpec") -> nn.Module:
    """Build the model as a rank begins with it, from the cell's seed.

    Ours are on `meta`: each rank draws only the weights that it keeps. A module of the user's draws
    its weights itself, whole and on the host, the same on every rank.
    """
    torch.manual_seed(cell.seed)
    if isinstance(cell.model, ModuleSpec):
        look = look_of(cell.model, cell.batch.resolution_px)
        model = build_model(cell)
        vars(model)["unused_parameters"] = look.unused
        return model
    with torch.device("meta"):
        return build_model(cell)
