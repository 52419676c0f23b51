"""How torch.distributed.checkpoint writes and reads boxes of whole tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
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

from vitsweep.training.shards import Shard


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
        """Return a box, or the copy of it that is written while training goes on."""
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
