"""What a model repeats, whatever its kind."""

from collections.abc import Iterable

from torch import nn

NORMS = (nn.LayerNorm, nn.BatchNorm2d)
"""Modules that `precision.keep_norm_fp32` spares."""

_MARK = "is_repeated_layer"


class Layer(nn.Module):
    """One of the parts that a model stacks: a transformer's block, a bottleneck.

    Sharding gathers the parameters of one layer at a time.
    """


def mark_layers(modules: Iterable[nn.Module]) -> None:
    """Let modules of a class that is not ours count as layers, and as blocks."""
    for module in modules:
        setattr(module, _MARK, True)


def is_marked(module: nn.Module) -> bool:
    """Return whether `mark_layers` was called on a module."""
    return _MARK in vars(module)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts that a model stacks, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, Layer) or is_marked(m)]
