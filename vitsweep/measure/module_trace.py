"""Names of modules in a trace: each part of the model names its forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vitsweep.model.block import blocks_of

MODULE = "vitsweep.module."
"""Begins the name of a range in which a module computes forward."""


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model by name: its blocks, and whatever lies beside them."""
    blocks = {id(block) for block in blocks_of(model)}

    def parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        inner = {id(child) for child in module.modules()} - {id(module)}
        if name and (id(module) in blocks or not inner & blocks):
            yield name, module
            return
        for child, part in module.named_children():
            yield from parts(f"{name}.{child}" if name else child, part)

    return dict(parts("", model))


@contextmanager
def naming_modules(model: nn.Module) -> Iterator[None]:
    """Let the parts of an uncompiled model name their forward passes in traces, until the block ends."""
    handles = []
    for name, unit in units_of(model).items():
        begun: list[Any] = []

        def enter(*_: object, name: str = name, begun: list[Any] = begun) -> None:
            begun.append(torch.profiler.record_function(MODULE + name))
            begun[-1].__enter__()

        def leave(*_: object, begun: list[Any] = begun) -> None:
            begun.pop().__exit__(None, None, None)

        handles.append(unit.register_forward_pre_hook(enter, prepend=True))
        # recomputation may end a forward pass early, by an exception
        handles.append(unit.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
