"""Checkpoints: all tensors and numbers that further training steps depend on, saved and loaded.

Written with torch.distributed.checkpoint: all ranks write at once, and what several ranks hold only
once. Model, optimizer state and averaged weights are whole tensors under the reference model's names
(`shards`), so that another number of ranks and another sharding can read them.

`torch.distributed.checkpoint` unpickles `.metadata`, and a pickle calls whatever it names. Here it may
name the classes that torch writes there and nothing else. The tensors themselves are read by torch
with `weights_only=True`.
"""

import io
import pickle
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.files import make_folder, read_bytes, refuse_links
from vitsweep.model.initialize import plain_name
from vitsweep.training.checkpoint_files import (
    CheckpointInfo,
    altered_file,
    checksum,
    course,
    damage,
    drop_old_checkpoints,
    read_info,
    step_folder,
    write_info,
)
from vitsweep.training.shards import Shard, Updated, untouched, updated, whole
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

# Reads a checkpoint's list of tensors without executing what a changed file would name.

WRITTEN_BY_TORCH = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}
"""Module -> what a checkpoint's `.metadata` names of it, besides the dtypes (torch 2.11 to 2.13)."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in WRITTEN_BY_TORCH.get(module, ()):
            raise pickle.UnpicklingError(f"it names `{module}.{name}`, which no checkpoint does")
        return super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """A FileSystemReader that executes nothing of the files and follows no link among them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which tensors the checkpoint holds, and where.

        Raises:
            pickle.UnpicklingError: the file names what torch does not write.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        refuse_links(path.parent)
        metadata = _MetadataUnpickler(io.BytesIO(read_bytes(path))).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# How torch.distributed.checkpoint writes and reads boxes of whole tensors.


def state_dict_of(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Return the shards as torch.distributed.checkpoint takes them, for the planners below."""
    return {_key(shard.name, shard.offsets): shard.values for shard in shards}


def _key(name: str, offsets: Iterable[int] | None) -> str:
    return f"{name}@{','.join(map(str, offsets or ()))}"


def _chunk(shard: Shard) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard.offsets), shard.values.shape)


class ShardSavePlanner(DefaultSavePlanner):
    """Writes each box once, though several ranks may hold it.

    Args:
        shards: of this rank, whose `state_dict_of` is saved.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = [
            WriteItem(
                index=MetadataIndex(shard.name, shard.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(shard),
                    properties=TensorProperties.create_from_tensor(shard.values),
                    size=torch.Size(shard.shape),
                ),
            )
            for shard in shards
        ]

    def create_local_plan(self) -> SavePlan:
        """Plan to write every box of this rank; the coordinator drops what others write."""
        self.plan = SavePlan(list(self._items))
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return a box."""
        found: Tensor = self.state_dict[_key(index.fqn, index.offset)]
        return found


class ShardLoadPlanner(DefaultLoadPlanner):
    """Reads what overlaps with the boxes of this rank, whoever wrote it.

    Args:
        shards: of this rank, whose `state_dict_of` is loaded into.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = list(shards)

    def create_local_plan(self) -> LoadPlan:
        """Plan what to read."""
        assert self.metadata is not None
        items = []
        for shard in self._shards:
            saved = self.metadata.state_dict_metadata[shard.name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(shard.name, saved, [_chunk(shard)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the box to read into."""
        found: Tensor = self.state_dict[_key(index.fqn, index.offset)]
        return found


# Every tensor that further training steps depend on, under names that do not depend on the ranks.


NON_FINITE = ".non_finite"
"""Ends the names of the flags that a loss was inf or NaN, one of each rank."""
OPTIMIZER = "optimizer."
"""Begins the names of optimizer state."""


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


OF_CELL = {
    *("params", "names", "in_blocks", "starts", "split_over_tensor"),
    *("foreach", "fused", "capturable", "differentiable"),
}
"""Entries of parameter groups that follow from the cell and the rank; all others a loop can set."""


def numbers(trainer: Trainer) -> dict[str, Any]:
    """Return the state of the loss scaler, and what a loop can set of the parameter groups, as copies.

    Raises:
        VitsweepError: an entry of a group is neither a number, text or tensor nor made of these.
    """
    groups = trainer.optimizer.param_groups
    return {
        "scaler": trainer.scaler.state() if trainer.scaler else {},
        "groups": [
            {k: _saved(v, f"[{number}][{k!r}]") for k, v in group.items() if k not in OF_CELL}
            for number, group in enumerate(groups)
        ],
    }


def _saved(value: Any, place: str) -> Any:
    """Return an entry of a group as `torch.load` takes it by default: numbers of NumPy become Python's."""
    if isinstance(value, np.generic | np.ndarray) and not value.shape:
        value = value.item()
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_saved(part, place) for part in value)
    if isinstance(value, list):
        return [_saved(part, place) for part in value]
    if isinstance(value, dict):
        return {_saved(key, place): _saved(part, place) for key, part in value.items()}
    if type(value) not in (bool, int, float, str, NoneType):
        raise VitsweepError(
            f"`optimizer.param_groups{place}` holds a {type(value).__name__}, which no checkpoint can hold: "
            "use numbers, text, tensors, or lists, tuples and dicts of these."
        )
    return value


def to_json(value: Any) -> Any:
    """Return what `numbers` returned of an entry in the types of JSON, for `from_json`."""
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [to_json(part) for part in value]}
    if isinstance(value, list):
        return [to_json(part) for part in value]
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(part)] for key, part in value.items()]}
    return value


def from_json(value: Any) -> Any:
    """Return the entry of which `to_json` returned this."""
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if "tuple" in value:
        return tuple(from_json(part) for part in value["tuple"])
    return {from_json(key): from_json(part) for key, part in value["dict"]}


EXTRA_STATE = "_extra_state"
"""Ends the name under which `state_dict` has what `get_extra_state` of a module returned."""


def give_extra_state(model: nn.Module, loaded: Iterable[Shard]) -> None:
    """Give modules their loaded extra state, which may be a copy of what they hold; others are left alone."""
    holders = {
        plain_name(f"model.{path}.{EXTRA_STATE}".replace("..", ".")): module
        for path, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    for shard in loaded:
        if shard.name in holders:
            holders[shard.name].set_extra_state(shard.values)


def complete_loading(
    trainer: Trainer,
    saved: Collection[str],
    scaler: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Do what follows once the tensors are loaded; every rank calls it.

    Optimizer state that was not saved is dropped: it is of parameters that never had a gradient. The model
    gets its weights from the masters, and scaler and groups get their numbers; where the groups are others
    than those that were saved, the step count, which is common.

    Args:
        trainer: whose tensors were loaded.
        saved: names of the tensors that were saved.
        scaler: as `numbers` returned it.
        groups: as `numbers` returned them.
    """
    for place in updated(trainer):
        held = [
            shard.name
            for name, value in _state(trainer.optimizer, place)
            for shard in place.shards(f"optimizer.{name}", value)
        ]
        if not any(name in saved for name in held):
            trainer.optimizer.state.pop(place.tensor, None)
    trainer.publish()
    own = trainer.optimizer.param_groups
    for number, group in enumerate(own):
        if len(own) == len(groups):
            group.update(deepcopy(dict(groups[number])))
        elif groups and "step" in groups[0]:
            group["step"] = groups[0]["step"]
    if trainer.scaler and scaler:
        trainer.scaler.restore(scaler)


def random_state(world: World, rank: int) -> dict[str, Tensor]:
    """Return the state of torch's generators, under the names that `rank` has for them."""
    states = {f"rank{rank}.random.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rank{rank}.random.cuda"] = torch.cuda.get_rng_state(world.device)
    return states


# Whether a checkpoint fits a trainer: its model, optimizer state and ranks.


def refusal(trainer: Trainer, folder: Path) -> str:
    """Return why a checkpoint is none of this trainer's, from its files alone; "" where it fits.

    Each rank reads its part of the files for their checksums: the answers of all ranks count.
    """
    world = trainer.world
    if reason := damage(folder) or altered_file(folder, world.rank, world.size):
        return f"`{folder}` is damaged: {reason}."
    try:
        saved = CheckpointReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling a damaged file raises anything
        return f"`{folder}` is damaged: its metadata cannot be read ({type(error).__name__})."
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


def saved_by(folder: Path, trainer: Trainer) -> str:
    """Return which ranks saved a checkpoint, where they are not those of the trainer; otherwise ""."""
    info, world, sharding = read_info(folder), trainer.world, trainer.cell.sharding.name
    here = (world.size, asdict(world.shape), sharding)
    if (info.world_size, info.mesh, info.sharding) == here:
        return ""
    return f"saved by {_described(info.world_size, info.mesh, info.sharding)}, read by {_described(*here)}"


def _kinds(names: Iterable[str]) -> set[str]:
    """Return what an optimizer keeps of each parameter: `exp_avg`, `step`."""
    return {name.split(".")[1] for name in names if name.startswith(OPTIMIZER)}


def _described(size: int, mesh: Mapping[str, int], sharding: str) -> str:
    degrees = [f"{axis}={degree}" for axis, degree in mesh.items() if degree > 1]
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    return f"{ranks} ({', '.join([f'sharding={sharding}', *degrees])})"


def first_of_all_ranks(reason: str) -> str:
    """Return the reason of the first rank that has one; "" where none has."""
    return next((found for found in gathered(reason) if found), "")


@dataclass(frozen=True)
class Position:
    """How far a training has come, besides its tensors.

    Attributes:
        step: optimizer steps done; the position in the data follows from it.
        seconds: training time of these steps.
        curve: evaluations so far.
    """

    step: int = 0
    seconds: float = 0.0
    curve: tuple[dict[str, float], ...] = ()


def save(trainer: Trainer, position: Position, training: Path) -> Path:
    """Save the state of a training; every rank calls it, and returns when the checkpoint is whole.

    A crash at any moment leaves either a whole checkpoint or one without its info file, which is
    ignored. Older ones than the one before are removed.

    Args:
        trainer: model, optimizer and scaler to save.
        position: how far it has come.
        training: folder of the training's checkpoints; each attempt has its own.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError, CheckpointException: on all ranks, where it cannot be written.
    """
    folder, world, own = step_folder(training, position.step), trainer.world, numbers(trainer)
    make_folder(folder)
    refuse_links(folder)  # torch would follow them
    info = CheckpointInfo(
        step=position.step,
        seconds=position.seconds,
        world_size=world.size,
        mesh=asdict(world.shape),
        sharding=trainer.cell.sharding.name,
        course=course(trainer.cell),
        curve=list(position.curve),
        scaler=own["scaler"],
        groups=[{key: to_json(value) for key, value in group.items()} for group in own["groups"]],
    )
    of_rank = {
        f"rank{world.rank}{NON_FINITE}": trainer.non_finite,
        **random_state(world, world.rank),
    }
    shards = [*shards_of_training(trainer), *(whole(n, value) for n, value in of_rank.items())]
    with warnings.catch_warnings(action="ignore"):  # of torch's, about its own future
        save_tensors(
            state_dict_of(shards),
            storage_writer=FileSystemWriter(folder),
            planner=ShardSavePlanner(shards),
            no_dist=not dist.is_initialized(),
        )
    error: OSError | None = None
    try:
        if world.rank == 0:
            _complete(folder, info)
    except OSError as full_disk:
        error = full_disk
    # no rank leaves before the checkpoint is whole
    if reason := first_of_all_ranks(str(error or "")):
        raise error or OSError(reason)
    return folder


def _complete(folder: Path, info: CheckpointInfo) -> None:
    """Write the info file, which makes the checkpoint whole, and remove old ones; on rank 0."""
    files = [path for path in folder.iterdir() if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    write_info(folder, replace(info, files=sizes, checksums={p.name: checksum(p) for p in files}))
    drop_old_checkpoints(folder.parent)


def load(trainer: Trainer, folder: Path) -> Position:
    """Load a checkpoint into a newly built trainer; every rank calls it.

    Ranks, mesh and sharding may be others than those that saved it.

    Raises:
        VitsweepError: on all ranks, if one of them finds that it is damaged, or of another model or
            optimizer; no weights are changed then.
        CheckpointException: a tensor cannot be read; some may have been loaded.
    """
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

    if reason := first_of_all_ranks(refusal(trainer, folder)):
        raise VitsweepError(reason)
    info, reader = read_info(folder), CheckpointReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    if any(name.startswith(OPTIMIZER) for name in saved):
        allocate_state(trainer.optimizer)
    needed, there = _kinds(shard.name for shard in shards_of_training(trainer)), _kinds(saved)
    other = f"`{folder}` is of another optimizer than `optimizer={trainer.cell.optimizer.name}`."
    if reason := first_of_all_ranks(other if there and needed - there else ""):
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
    give_extra_state(trainer.model, shards)
    groups = [{key: from_json(value) for key, value in group.items()} for group in info.groups]
    complete_loading(trainer, saved, info.scaler, groups)
    for name, state in random.items():
        if name.endswith("cuda"):
            torch.cuda.set_rng_state(state, trainer.world.device)
        else:
            torch.set_rng_state(state)
    trainer.non_finite.fill_(any(bool(flag) for flag in flags.values()))
    return Position(info.step, info.seconds, tuple(info.curve))
