"""This rank's parts of sharded parameters as plain tensors, for the optimizer to update."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LocalShards:
    """Plain tensors in the memory of the shards that this rank holds.

    Each operation on a DTensor first decides how its result is spread over the ranks, which takes the
    host longer than the operation takes on a small shard, hundreds of times per update. An update that
    treats every number alone (AdamW, SGD, Lion) asks no other rank: it gives the same on the parts.

    Args:
        groups: parameter groups, in which parameters may be DTensors that keep their memory.

    Attributes:
        sharded_groups: these groups.
        groups: the same with the parts in place of DTensors, for the optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._pairs: list[tuple[DTensor, nn.Parameter]] = []
        self.sharded_groups = groups
        self.groups = [{**g, "params": [self._part(p) for p in g["params"]]} for g in groups]

    def _part(self, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        with torch.no_grad():  # the shard itself, not a view that autograd follows
            part = nn.Parameter(parameter.to_local())
        self._pairs.append((parameter, part))
        return part

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Let the parts have the gradients of the shards: the same memory."""
        for parameter, part in self._pairs:
            gradient: Any = parameter.grad
            part.grad = None if gradient is None else gradient.to_local()

    def drop_gradients(self) -> None:
        """Drop the gradients of the shards; the optimizer drops those of the parts."""
        for parameter, _ in self._pairs:
            parameter.grad = None
