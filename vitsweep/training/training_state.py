"""Every tensor that further training steps depend on, under names that do not depend on the ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitsweep.training.shards import Shard, Updated, untouched, updated, whole
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

NON_FINITE = ".non_finite"
"""Ends the names of the flags that a loss was inf or NaN, one of each rank."""
OPTIMIZER = "optimizer."
"""Begins the names of optimizer state, perhaps after that of a rank."""


def all_shards(trainer: Trainer) -> Iterator[Shard]:
    """Yield every tensor that further steps depend on; loading writes into these tensors."""
    yield from shards_of_training(trainer)
    world = trainer.world
    yield whole(f"rank{world.rank}{NON_FINITE}", trainer.non_finite)
    for name, state in random_state(world, world.rank).items():
        yield whole(name, state)


def shards_of_training(trainer: Trainer) -> Iterator[Shard]:
    """Yield model, optimizer state and averaged weights: what does not depend on the ranks.

    Of half-precision weights with masters only the masters are there; the others follow from them.
    """
    places = updated(trainer)
    for index, place in enumerate(places):
        yield from place.shards("model", place.tensor)
        for name, value in _state(trainer.optimizer, place):
            yield from place.shards(f"optimizer.{name}", value)
        if trainer.average:
            yield from place.shards("average", trainer.average.averages[index])
    yield from untouched(trainer)


def _state(optimizer: Optimizer, place: Updated) -> list[tuple[str, Tensor]]:
    state = optimizer.state.get(place.tensor, {})
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor)]


def allocate_state(optimizer: Optimizer) -> None:
    """Let an optimizer allocate its state, for a checkpoint to be loaded into.

    It takes a step with zero gradients and zero learning rate, as
    torch.distributed.checkpoint.state_dict does.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def drop_unsaved_state(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Drop state that the checkpoint does not hold: of parameters that never had a gradient."""
    for place in updated(trainer):
        held = [
            shard.name
            for name, value in _state(trainer.optimizer, place)
            for shard in place.shards(f"optimizer.{name}", value)
        ]
        if not any(name in saved for name in held):
            trainer.optimizer.state.pop(place.tensor, None)


def random_state(world: World, rank: int) -> dict[str, Tensor]:
    """Return the state of torch's generators, under the names that `rank` has for them."""
    states = {f"rank{rank}.random.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rank{rank}.random.cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def restore_random_state(states: Mapping[str, Tensor], world: World) -> None:
    """Give torch's generators the states that `random_state` returned."""
    for name, state in states.items():
        if name.endswith("cuda"):
            torch.cuda.set_rng_state(state, world.device)
        else:
            torch.set_rng_state(state)
