"""Checkpoints: all tensors and numbers that further training steps depend on, saved and loaded.

Written with torch.distributed.checkpoint: all ranks write at once, shards (DTensor) once each, and
what ranks hold alike only once. It is read on the world that wrote it.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from vitsweep.errors import VitsweepError
from vitsweep.spec.mesh_shape import AXES
from vitsweep.training.checkpoint_files import CheckpointInfo, read_info, write_info
from vitsweep.training.trainer import Trainer
from vitsweep.world import World


def save(trainer: Trainer, step: int, seconds: float, folder: Path) -> None:
    """Save the state of a training after `step` optimizer steps; every rank calls it.

    A crash at any moment leaves either a whole checkpoint or one without its info file, which is
    ignored.

    Args:
        trainer: model, optimizer and scaler to save.
        step: optimizer steps done; the position in the data follows from it.
        seconds: training time of these steps.
        folder: where to save; each attempt has its own.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    world = trainer.world
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore"):  # of torch's, about its own future
        save_tensors(
            _tensors(trainer),
            storage_writer=FileSystemWriter(folder),
            no_dist=not dist.is_initialized(),
        )
    if world.rank == 0:
        info = CheckpointInfo(
            step=step,
            seconds=seconds,
            world_size=world.size,
            mesh=asdict(world.shape),
            scaler=trainer.scaler.state() if trainer.scaler else {},
            groups=[_numbers(group) for group in trainer.optimizer.param_groups],
        )
        write_info(folder, info)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves before the checkpoint is whole


def load(trainer: Trainer, folder: Path) -> CheckpointInfo:
    """Load a checkpoint into a newly built trainer; every rank calls it.

    Raises:
        VitsweepError: ranks or mesh are not those that saved it.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    info = read_info(folder)
    _check_world(info, trainer.world, folder)
    reader = FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata.keys()
    if any(".optimizer." in name for name in saved):
        _allocate_state(trainer.optimizer)
    tensors = {name: tensor for name, tensor in _tensors(trainer).items() if name in saved}
    with warnings.catch_warnings(action="ignore"):
        load_tensors(tensors, storage_reader=reader, no_dist=not dist.is_initialized())
    _drop_unsaved_state(trainer, tensors)
    _restore_random_state(tensors, trainer.world)
    for group, numbers in zip(trainer.optimizer.param_groups, info.groups, strict=True):
        group.update(numbers)
    if trainer.scaler:
        trainer.scaler.restore(info.scaler)
    return info


def _check_world(info: CheckpointInfo, world: World, folder: Path) -> None:
    here = asdict(world.shape)
    if (info.world_size, info.mesh) == (world.size, here):
        return
    raise VitsweepError(
        f"`{folder}` was saved by {_described(info.world_size, info.mesh)}, and this run has "
        f"{_described(world.size, here)}: a training goes on in the world that began it. Give it "
        "the same `resources.nodes`, `resources.ranks_per_node` and `mesh`, or delete the folder to "
        "train from the beginning."
    )


def _described(size: int, mesh: Mapping[str, int]) -> str:
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1)
    return f"{size} ranks ({degrees or 'no axis above 1'})"


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return every tensor that further steps depend on, by name; loading writes into these tensors.

    Ranks of one pipeline stage and tensor-parallel part hold the same weights, as copies or as
    DTensors, under the same name. Names of tensors that differ between ranks carry the rank.
    """
    world, optimizer = trainer.world, trainer.optimizer
    at = dict(zip(AXES, world.coordinates(), strict=True))
    shared, own = f"stage{at['pipeline']}.part{at['tensor']}", f"rank{world.rank}"
    tensors = {f"{shared}.model.{n}": t for n, t in _weights(trainer)}
    holder = own if trainer.cell.sharding.shards_optimizer else shared
    if trainer.masters:
        tensors |= {f"{holder}.master.{n}": t for n, t in _parameters(optimizer)}
    tensors |= {f"{holder}.optimizer.{n}": t for n, t in _state(optimizer)}
    if trainer.average:  # of this rank's shards
        tensors |= {f"{own}.average.{i}": t for i, t in enumerate(trainer.average.averages)}
    return tensors | {
        f"{own}.non_finite": trainer.non_finite,
        **{f"{own}.random.{name}": state for name, state in _random_state(world).items()},
    }


def _weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    state = trainer.model.state_dict()
    return ((name, value) for name, value in state.items() if isinstance(value, Tensor))


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield f"{g}.{p}", parameter.detach()


def _state(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            for name, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    yield f"{g}.{p}.{name}", value


def _allocate_state(optimizer: Optimizer) -> None:
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


def _drop_unsaved_state(trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
    """Drop state that the checkpoint does not hold: of parameters that never had a gradient."""
    optimizer, known = trainer.optimizer, {id(tensor) for tensor in tensors.values()}
    for parameter, state in list(optimizer.state.items()):
        if not any(id(value) in known for value in state.values()):
            del optimizer.state[parameter]


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter group (apex keeps its step count there)."""
    return {key: value for key, value in group.items() if type(value) in (int, float)}


def _random_state(world: World) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def _restore_random_state(tensors: Mapping[str, Tensor], world: World) -> None:
    torch.set_rng_state(tensors[f"rank{world.rank}.random.cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"rank{world.rank}.random.cuda"], world.device)
