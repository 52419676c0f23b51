"""FLOPs of a module whose formula nobody wrote, by torch's counter."""

from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from vitsweep.model.module_look import differentiable, outputs_of
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import build_module, example_of, without_weights

IMAGES = 2
"""BatchNorm takes no batch of one value."""


class Counted(NamedTuple):
    """What was counted.

    Attributes:
        train_flops: of one image, forward and backward; one multiply-add is two FLOPs, only matrix
            products, convolutions and attention count.
        num_parameters: of the module.
    """

    train_flops: int
    num_parameters: int


_COUNTED: dict[tuple[str, int], Counted] = {}


def counted(spec: ModuleSpec, resolution_px: int) -> Counted:
    """Count one forward and backward pass, on `meta`, or on the host where the module fails there."""
    key = spec.key, resolution_px
    if key not in _COUNTED:
        module = without_weights(spec, resolution_px)
        try:
            _COUNTED[key] = _count(module, spec, resolution_px)
        except Exception:  # whatever an operation without a meta kernel raises
            _COUNTED[key] = _count(build_module(spec, resolution_px), spec, resolution_px)
    return _COUNTED[key]


def _count(module: torch.nn.Module, spec: ModuleSpec, resolution_px: int) -> Counted:
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    example = example_of(spec, IMAGES, resolution_px)
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example)
    counter = FlopCounterMode(display=False)
    with counter:
        torch.stack(
            [part.sum() for part in differentiable(outputs_of(module, batch))]
        ).sum().backward()
    return Counted(counter.get_total_flops() // IMAGES, sum(p.numel() for p in parameters))
