"""Clipping by the norm of all gradients, where no rank has all of them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from vitsweep.world import World


def clip_gradients(
    groups: Iterable[dict[str, Any]], limit: float, world: World, *, in_slices: bool = False
) -> None:
    """Scale all gradients so that their norm over the whole model is at most `limit`.

    Args:
        groups: parameter groups; those with `split_over_tensor` hold parts of matrices, of which
            each rank of a tensor group has another, all others are the same on these ranks.
        limit: of the norm.
        world: ranks; pipeline stages hold different parameters.
        in_slices: ranks that share a mean gradient hold different slices of it (ZeRO-1).
    """
    groups = list(groups)
    parameters = [p for group in groups for p in group["params"]]
    kinds = _by_kind(parameters)
    if world.shape.tensor == world.shape.pipeline == 1 and not in_slices and len(kinds) == 1:
        clip_grad_norm_(parameters, limit)
        return
    parts, wholes = (
        [p for g in groups if bool(g.get("split_over_tensor")) is split for p in g["params"]]
        for split in (True, False)
    )
    square, of_wholes = _square(parts, world), _square(wholes, world)
    if in_slices and world.shape.gradient_shares > 1:
        for each in (square, of_wholes):
            dist.all_reduce(each, group=world.gradient_group())
    if world.shape.tensor > 1:
        dist.all_reduce(square, group=world.axis("tensor").get_group())
    square += of_wholes
    if world.shape.pipeline > 1:
        dist.all_reduce(square, group=world.axis("pipeline").get_group())
    for kind in kinds:
        clip_grads_with_norm_(kind, limit, square.sqrt())


def _by_kind(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Part shards from whole parameters, which no operation on lists may mix."""
    kinds = (
        [p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)
    )
    return [kind for kind in kinds if kind]


def _square(parameters: list[Tensor], world: World) -> Tensor:
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    for kind in _by_kind(parameters):
        gradients = [p.grad for p in kind if p.grad is not None]
        if gradients:
            norm = get_total_norm(gradients)
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            total += whole.double().square()
    return total
