"""From a cell to its reference model, before any technique wraps it."""

import torch
from torch import nn

from vitsweep.model.initialize import draw_weights
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import build_module
from vitsweep.model.vit import MultiDimViT, ViT
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import MultiDimSpec, ViTSpec


def build_model(cell: "CellSpec", *, of_reference: bool = False) -> nn.Module:
    """Build the model that `cell` trains; on torch's default device, in its default dtype.

    On `meta` it has shapes and no weights, until `model.initialize.materialize` draws them.

    Args:
        cell: what is trained.
        of_reference: with what the objective's `reference` adds, which has the same parameters.
    """
    objective = cell.objective.open(cell)
    model = (objective.reference() if of_reference else objective).network(_backbone(cell))
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if hasattr(model, "draw") and not (on_meta or cell.objective.is_default):
        draw_weights(model)  # those that the objective added, too
    return model


def _backbone(cell: "CellSpec") -> nn.Module:
    shape = cell.shape
    if isinstance(shape, ModuleSpec):
        return build_module(shape, cell.batch.resolution_px)
    network: nn.Module | None = shape.own_network(cell.batch.resolution_px)
    if network is not None:
        return network
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
    if cell.model.draws_its_weights:
        return build_model(cell)
    with torch.device("meta"):
        return build_model(cell)
