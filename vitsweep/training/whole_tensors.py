"""Whole tensors by the plain model's names, joined from shards, split matrices and pipeline stages."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitsweep.collectives.parallel_linear import ColumnParallelLinear, split_over_ranks
from vitsweep.model.parameter_names import plain_name
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

Named = dict[str, Tensor]


def whole_tensors(trainer: Trainer, read: Callable[[nn.Parameter], Tensor | None]) -> Named:
    """Return what `read` gives for each parameter (itself, its gradient), whole, on every rank.

    Every rank must call it: shards are gathered over their ranks, parts of split matrices over the
    tensor-parallel ones, and stages over the pipeline. What `read` gives None for is left out.
    """
    model, world = trainer.model, trainer.world
    found: Named = {}
    for stage in model if isinstance(model, nn.ModuleList) else [model]:
        found |= _whole_stage(stage, read, world)
    if world.shape.pipeline > 1:
        stages: list[Any] = [None] * world.shape.pipeline
        dist.all_gather_object(stages, found, group=world.axis("pipeline").get_group())
        found = {name: value for stage in stages for name, value in stage.items()}
    return found


def _whole_stage(
    stage: nn.Module, read: Callable[[nn.Parameter], Tensor | None], world: World
) -> Named:
    split, modules = split_over_ranks(stage), dict(stage.named_modules())
    found: Named = {}
    for name, parameter in stage.named_parameters():
        value: Any = read(parameter)
        if value is None:
            continue
        value = value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
        if name in split:
            value = _joined(value, modules[name.rpartition(".")[0]], name, world)
        found[plain_name(name)] = value
    return found


def _joined(part: Tensor, linear: nn.Module, name: str, world: World) -> Tensor:
    pieces: list[Any] = [None] * world.shape.tensor
    dist.all_gather_object(pieces, part, group=world.axis("tensor").get_group())
    if not isinstance(linear, ColumnParallelLinear):
        return torch.cat(pieces, 1)
    # What is fused (q, k and v) is cut for itself.
    return torch.cat([p.unflatten(0, (linear.parts, -1)) for p in pieces], 1).flatten(0, 1)
