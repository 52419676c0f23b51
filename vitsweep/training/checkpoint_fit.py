"""Whether a checkpoint fits a trainer: its model, optimizer state and ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitsweep.training.checkpoint_files import altered_file, damage, read_info
from vitsweep.training.trainer import Trainer
from vitsweep.training.training_state import OPTIMIZER, shards_of_training


def refusal(trainer: Trainer, folder: Path) -> str:
    """Return why a checkpoint is none of this trainer's, from its files alone; "" where it fits.

    Each rank reads its part of the files for their checksums: the answers of all ranks count.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    world = trainer.world
    if reason := damage(folder) or altered_file(folder, world.rank, world.size):
        return f"`{folder}` is damaged: {reason}."
    try:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling a damaged file raises anything
        return f"`{folder}` is damaged: its metadata cannot be read ({type(error).__name__})."
    return _other_model(trainer, saved, folder)


def saved_by(folder: Path, trainer: Trainer) -> str:
    """Return which ranks saved a checkpoint, where they are not those of the trainer; otherwise ""."""
    info, world, sharding = read_info(folder), trainer.world, trainer.cell.sharding.name
    here = (world.size, asdict(world.shape), sharding)
    if (info.world_size, info.mesh, info.sharding) == here:
        return ""
    return f"saved by {_described(info.world_size, info.mesh, info.sharding)}, read by {_described(*here)}"


def _other_model(trainer: Trainer, saved: Mapping[str, Any], folder: Path) -> str:
    for shard in shards_of_training(trainer):
        kind, _, own = shard.name.partition(".")
        if kind != "model":
            continue
        if shard.name not in saved:
            return f"`{folder}` is of another model: it has no `{own}`."
        here, there = shard.shape, tuple(getattr(saved[shard.name], "size", ()))
        if here != there:
            return f"`{folder}` is of another model: the shape of its `{own}` is {there} instead of {here}."
    return ""


def other_state(trainer: Trainer, saved: Mapping[str, Any], folder: Path) -> str:
    """Return why the optimizer state of a checkpoint is none of this trainer's; "" where it fits.

    State in blocks of numbers with a common scale cannot be cut elsewhere: it is kept by rank.
    """
    here = {s.name for s in shards_of_training(trainer) if OPTIMIZER in s.name}
    by_rank = [n for n in {*here, *saved} if n.startswith("rank") and OPTIMIZER in n]
    if by_rank and saved_by(folder, trainer):
        return (
            f"`{folder}` cannot be read by {_described_trainer(trainer)}: `optimizer="
            f"{trainer.cell.optimizer.name}` keeps blocks of numbers with one scale, which cannot be cut "
            "elsewhere. Go on with the ranks, mesh and sharding that saved it."
        )
    kinds, there = _kinds(here), _kinds(name for name in saved if OPTIMIZER in name)
    if there and kinds - there:
        return (
            f"`{folder}` is of another optimizer: it holds {_quoted(there)}, and `optimizer="
            f"{trainer.cell.optimizer.name}` needs {_quoted(kinds)}."
        )
    return ""


def _kinds(names: Iterable[str]) -> set[str]:
    """Return what an optimizer keeps of each parameter: `exp_avg`, `step`."""
    return {name.partition(OPTIMIZER)[2].partition(".")[0] for name in names}


def _quoted(kinds: set[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in sorted(kinds))


def _described(size: int, mesh: Mapping[str, int], sharding: str) -> str:
    degrees = [f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1]
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    return f"{ranks} ({', '.join([f'sharding={sharding}', *degrees])})"


def _described_trainer(trainer: Trainer) -> str:
    world = trainer.world
    return _described(world.size, asdict(world.shape), trainer.cell.sharding.name)


def first_of_all_ranks(reason: str) -> str:
    """Return the reason of the first rank that has one; "" where none has."""
    reasons: list[Any] = [reason]
    if dist.is_initialized():
        reasons = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
    return next((found for found in reasons if found), "")
