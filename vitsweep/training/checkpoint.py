"""Checkpoints: all tensors and numbers that further training steps depend on, saved and loaded.

Written with torch.distributed.checkpoint: all ranks write at once, shards (DTensor) once each, and
what ranks hold alike only once. It is read on the world that wrote it.
"""

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from vitsweep.errors import VitsweepError
from vitsweep.spec.mesh_shape import AXES
from vitsweep.training.checkpoint_files import (
    CheckpointInfo,
    damage,
    drop_old_checkpoints,
    read_info,
    step_folder,
    write_info,
)
from vitsweep.training.trainer import Trainer
from vitsweep.world import World


@dataclass(frozen=True)
class Progress:
    """How far a training has come, beside its tensors.

    Attributes:
        step: optimizer steps done; the position in the data follows from it.
        seconds: training time of these steps.
        curve: evaluations so far.
    """

    step: int = 0
    seconds: float = 0.0
    curve: tuple[dict[str, float], ...] = ()


def save(trainer: Trainer, progress: Progress, training: Path) -> Path:
    """Save the state of a training; every rank calls it, and returns when the checkpoint is whole.

    A crash at any moment leaves either a whole checkpoint or one without its info file, which is
    ignored. Older ones than the one before are removed.

    Args:
        trainer: model, optimizer and scaler to save.
        progress: how far it has come.
        training: folder of the training's checkpoints; each attempt has its own.

    Returns:
        The checkpoint's folder.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

    folder = step_folder(training, progress.step)
    folder.mkdir(parents=True, exist_ok=True)
    info = _info(trainer, progress)
    with warnings.catch_warnings(action="ignore"):  # of torch's, about its own future
        save_tensors(
            _tensors(trainer),
            storage_writer=FileSystemWriter(folder),
            no_dist=not dist.is_initialized(),
        )
    if trainer.world.rank == 0:
        _complete(folder, info)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves before the checkpoint is whole
    return folder


def start_save(
    trainer: Trainer, progress: Progress, training: Path, group: dist.ProcessGroup | None
) -> Future[None]:
    """Copy the state of a training to the host and write it while training goes on; all ranks call it.

    As `save`, but it returns when the copy is made. The checkpoint is whole when the futures of all
    ranks are done.

    Args:
        trainer: model, optimizer and scaler to save.
        progress: how far it has come.
        training: folder of the training's checkpoints.
        group: of all ranks, on the CPU, which nothing else uses: the writing threads talk over it.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    folder = step_folder(training, progress.step)
    folder.mkdir(parents=True, exist_ok=True)
    info = _info(trainer, progress)
    with warnings.catch_warnings(action="ignore"):
        written: Any = async_save(
            _tensors(trainer),
            storage_writer=FileSystemWriter(
                folder
            ),  # stages a copy of every tensor, on the CPU too
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    whole: Future[None] = Future()

    def complete(tensors: "Future[Any]") -> None:
        error = tensors.exception()
        try:
            if error is None and trainer.world.rank == 0:
                _complete(folder, info)
        except OSError as full_disk:
            error = full_disk
        if error:
            whole.set_exception(error)
        else:
            whole.set_result(None)

    written.add_done_callback(complete)
    return whole


def _info(trainer: Trainer, progress: Progress) -> CheckpointInfo:
    world = trainer.world
    return CheckpointInfo(
        step=progress.step,
        seconds=progress.seconds,
        world_size=world.size,
        mesh=asdict(world.shape),
        scaler=trainer.scaler.state() if trainer.scaler else {},
        groups=[_numbers(group) for group in trainer.optimizer.param_groups],
        curve=list(progress.curve),
    )


def _complete(folder: Path, info: CheckpointInfo) -> None:
    """Write the info file, which makes the checkpoint whole, and remove old ones; on rank 0."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    write_info(folder, replace(info, files=sizes))
    drop_old_checkpoints(folder.parent)


def load(trainer: Trainer, folder: Path) -> Progress:
    """Load a checkpoint into a newly built trainer; every rank calls it.

    Raises:
        VitsweepError: ranks, mesh or model are not those that saved it; nothing is changed then.
        CheckpointException: a tensor cannot be read; some may have been loaded.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    if reason := refusal(trainer, folder):
        raise VitsweepError(reason)
    info, reader = read_info(folder), FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
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
    return Progress(info.step, info.seconds, tuple(info.curve))


def refusal(trainer: Trainer, folder: Path) -> str:
    """Return why a checkpoint is none of this trainer's, from its files alone; "" where it fits."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if reason := damage(folder):
        return f"`{folder}` is damaged: {reason}."
    info = read_info(folder)
    try:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling a damaged file raises anything
        return f"`{folder}` is damaged: its metadata cannot be read ({type(error).__name__})."
    return _other_world(info, trainer.world, folder) or _other_model(trainer, saved, folder)


def _other_model(trainer: Trainer, saved: Mapping[str, Any], folder: Path) -> str:
    for name, tensor in _tensors(trainer).items():
        if ".model." not in name:
            continue
        own = name.partition(".model.")[2]
        if name not in saved:
            return f"`{folder}` is of another model: it has no `{own}`."
        here, there = tuple(tensor.shape), tuple(getattr(saved[name], "size", ()))
        if here != there:
            return f"`{folder}` is of another model: the shape of its `{own}` is {there} instead of {here}."
    return ""


def _other_world(info: CheckpointInfo, world: World, folder: Path) -> str:
    here = asdict(world.shape)
    if (info.world_size, info.mesh) == (world.size, here):
        return ""
    return (
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
