"""Checkpoints: all tensors and numbers that further training steps depend on, saved and loaded.

Written with torch.distributed.checkpoint: all ranks write at once, and what several ranks hold only
once. Model, optimizer state and averaged weights are whole tensors under the plain model's names
(`shards`), so that another number of ranks and another sharding can read them.
"""

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from vitsweep.errors import VitsweepError
from vitsweep.training.checkpoint_files import (
    CheckpointInfo,
    checksum,
    drop_old_checkpoints,
    read_info,
    step_folder,
    write_info,
)
from vitsweep.training.checkpoint_fit import first_of_all_ranks, other_state, refusal
from vitsweep.training.course import course
from vitsweep.training.shard_planners import ShardLoadPlanner, ShardSavePlanner, state_dict_of
from vitsweep.training.shards import whole
from vitsweep.training.trainer import Trainer
from vitsweep.training.training_state import (
    NON_FINITE,
    OPTIMIZER,
    all_shards,
    allocate_state,
    drop_unsaved_state,
    random_state,
    restore_random_state,
    shards_of_training,
)


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
    info, shards = _info(trainer, progress), list(all_shards(trainer))
    with warnings.catch_warnings(action="ignore"):  # of torch's, about its own future
        save_tensors(
            state_dict_of(shards),
            storage_writer=FileSystemWriter(folder),
            planner=ShardSavePlanner(shards),
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
    info, shards = _info(trainer, progress), list(all_shards(trainer))
    with warnings.catch_warnings(action="ignore"):
        written: Any = async_save(
            state_dict_of(shards),
            storage_writer=FileSystemWriter(folder),  # copies every tensor first, on the CPU too
            planner=ShardSavePlanner(shards),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    done: Future[None] = Future()

    def complete(tensors: "Future[Any]") -> None:
        error = tensors.exception()
        try:
            if error is None and trainer.world.rank == 0:
                _complete(folder, info)
        except OSError as full_disk:
            error = full_disk
        if error:
            done.set_exception(error)
        else:
            done.set_result(None)

    written.add_done_callback(complete)
    return done


def _info(trainer: Trainer, progress: Progress) -> CheckpointInfo:
    world = trainer.world
    return CheckpointInfo(
        step=progress.step,
        seconds=progress.seconds,
        world_size=world.size,
        mesh=asdict(world.shape),
        sharding=trainer.cell.sharding.name,
        course=course(trainer.cell),
        scaler=trainer.scaler.state() if trainer.scaler else {},
        groups=[_numbers(group) for group in trainer.optimizer.param_groups],
        curve=list(progress.curve),
    )


def _complete(folder: Path, info: CheckpointInfo) -> None:
    """Write the info file, which makes the checkpoint whole, and remove old ones; on rank 0."""
    files = [path for path in folder.iterdir() if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    write_info(folder, replace(info, files=sizes, checksums={p.name: checksum(p) for p in files}))
    drop_old_checkpoints(folder.parent)


def load(trainer: Trainer, folder: Path) -> Progress:
    """Load a checkpoint into a newly built trainer; every rank calls it.

    Ranks, mesh and sharding may be others than those that saved it.

    Raises:
        VitsweepError: on all ranks, if one of them finds that it is damaged, of another model, or holds
            optimizer state that cannot be dealt out anew; no weights are changed then.
        CheckpointException: a tensor cannot be read; some may have been loaded.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    if reason := first_of_all_ranks(refusal(trainer, folder)):
        raise VitsweepError(reason)
    info, reader = read_info(folder), FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    if any(OPTIMIZER in name for name in saved):
        allocate_state(trainer.optimizer)
    if reason := first_of_all_ranks(other_state(trainer, saved, folder)):
        raise VitsweepError(reason)
    # A rank that was not there goes on with the random numbers of one that was.
    random = dict(random_state(trainer.world, trainer.world.rank % info.world_size))
    flags = {name: torch.zeros((), dtype=torch.bool) for name in saved if name.endswith(NON_FINITE)}
    shards = [shard for shard in shards_of_training(trainer) if shard.name in saved]
    shards += [whole(name, value) for name, value in (random | flags).items() if name in saved]
    with warnings.catch_warnings(action="ignore"):
        load_tensors(
            state_dict_of(shards),
            storage_reader=reader,
            planner=ShardLoadPlanner(shards),
            no_dist=not dist.is_initialized(),
        )
    drop_unsaved_state(trainer, saved)
    trainer.publish()
    restore_random_state(random, trainer.world)
    trainer.non_finite.fill_(any(bool(flag) for flag in flags.values()))
    _restore_numbers(trainer.optimizer, info)
    if trainer.scaler and info.scaler:
        trainer.scaler.restore(info.scaler)
    return Progress(info.step, info.seconds, tuple(info.curve))


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter group (apex keeps its step count there)."""
    return {key: value for key, value in group.items() if type(value) in (int, float)}


def _restore_numbers(optimizer: Optimizer, info: CheckpointInfo) -> None:
    """Give the parameter groups their numbers; where they are others, the step count, which is common."""
    groups = optimizer.param_groups
    if len(groups) == len(info.groups):
        for group, numbers in zip(groups, info.groups, strict=True):
            group.update(numbers)
    elif info.groups and "step" in info.groups[0]:
        for group in groups:
            group["step"] = info.groups[0]["step"]
