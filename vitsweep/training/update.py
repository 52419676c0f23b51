"""From gradients to weights: parameter groups, masters, loss scaling, clipping."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from vitsweep.collectives.owners import Parts, parts_of_rows
from vitsweep.collectives.parallel_linear import split_over_ranks
from vitsweep.collectives.primitives import local
from vitsweep.model.block import is_marked
from vitsweep.model.initialize import plain_name
from vitsweep.world import World


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameters in two groups: matrices with weight decay, everything else without.

    Norms, biases, position embeddings and class tokens do not decay (timm does the same for norms
    and biases; DeiT, arXiv:2012.12877, for embeddings and tokens too). pycls decays all of
    them, unless `USE_CUSTOM_WEIGHT_DECAY` of its `BN`, `LN` or `BIAS` is set. A matrix is what has
    at least two axes and a name that ends in `weight`; the table of an `nn.Embedding` is one, as in timm.
    Works on wrapped and sharded models.

    Each group holds the reference model's `names` of its parameters, and which of them lie `in_blocks`.
    Parts of matrices that are split over tensor ranks form groups of their own, marked by
    `split_over_tensor`: a norm over all parameters adds them up over these ranks.
    """
    split, inside = split_over_ranks(model), names_in_blocks(model)
    found: dict[tuple[bool, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and name.endswith("weight")
            found.setdefault((name in split, decays), {})[plain_name(name)] = parameter
    order = ((False, True), (False, False), (True, True), (True, False))
    return [
        {"params": list(found[key].values()), "names": list(found[key])}
        | {"in_blocks": inside & found[key].keys()}
        | {"weight_decay": weight_decay if key[1] else 0.0}
        | ({"split_over_tensor": True} if key[0] else {})
        for key in order
        if key in found  # a pipeline stage may lack one
    ]


def names_in_blocks(model: nn.Module) -> set[str]:
    """Return the names of parameters in the blocks that a user names, or in ours."""
    marked = [name for name, module in model.named_modules() if is_marked(module)]
    names = {name: plain_name(name) for name, _ in model.named_parameters()}
    if not marked:
        return {plain for plain in names.values() if "blocks." in plain}
    starts = tuple(f"{name}." for name in marked)
    return {plain for name, plain in names.items() if name.startswith(starts)}


class MasterWeights:
    """Masters of all parameters below float32; all others, complex ones too, are their own masters.

    Attributes:
        groups: parameter groups over the masters, for the optimizer.
        copies: the masters of parameters below float32.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._model: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.groups = [{**g, "params": [self._master(p) for p in g["params"]]} for g in groups]

    def _master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        master = torch.nn.Parameter(parameter.detach().float())
        self._model.append(parameter)
        self.copies.append(master)
        return master

    def of(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter: itself where it is not in half precision."""
        for own, master in zip(self._model, self.copies, strict=True):
            if own is parameter:
                return master
        return parameter

    def take_gradients(self) -> None:
        """Copy the model's gradients to the masters: few kernels for all, in place where buffers are.

        Without buffers of the optimizer's own they are freed again after the update: kept, they
        would add four bytes per parameter to the peak of the backward pass.
        """
        pairs = zip(self._model, self.copies, strict=True)
        used = [(p.grad, master) for p, master in pairs if p.grad is not None]
        for _, master in used:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        if used:
            gradients, masters = zip(*used, strict=True)
            torch._foreach_copy_([m.grad for m in masters], list(gradients))

    def publish(self) -> None:
        """Copy the updated masters back to the model."""
        with torch.no_grad():
            if self._model:
                torch._foreach_copy_(self._model, self.copies)

    def zero_model_gradients(self) -> None:
        """Drop the gradients of the half-precision parameters; the optimizer drops the masters'."""
        for parameter in self._model:
            parameter.grad = None


# This rank's parts of sharded parameters as plain tensors, for the optimizer to update.


class LocalShards:
    """Plain tensors in the memory of the shards that this rank holds.

    Each operation on a DTensor first decides how its result is spread over the ranks, which takes the
    host longer than the operation takes on a small shard, hundreds of times per update. An update that
    treats every number alone (AdamW, SGD) asks no other rank: it gives the same on the parts.

    Args:
        groups: parameter groups, in which parameters may be DTensors that keep their memory.

    Attributes:
        sharded_groups: these groups.
        groups: the same with the parts in place of DTensors, for the optimizer; `parts` says which rows of
            a tensor each rank has.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._pairs: list[tuple[DTensor, nn.Parameter]] = []
        self.sharded_groups = groups
        self.groups = [
            {**g, "params": [self._part(p) for p in g["params"]], "parts": _parts(g)}
            for g in groups
        ]

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


def _parts(group: dict[str, Any]) -> dict[str, Parts]:
    pairs = zip(group["names"], group["params"], strict=True)
    found = {n: parts_of_rows(p) for n, p in pairs if isinstance(p, DTensor)}
    return {name: parts for name, parts in found.items() if parts}


# Loss scaling with one decision about overflow for all ranks.


class LossScaler:
    """torch's GradScaler, dynamic or constant, agreeing on found_inf across ranks.

    Where ranks hold different gradients (pipeline stages, tensor shards, ZeRO shards) an overflow
    on one would make it skip a step that the others take: every flag is max-reduced. apex caps
    its scale at 2**24; torch does not.

    Args:
        loss_scale: "dynamic" (2**16 at first, x2 after 2000 good steps, /2 after an overflow) or a
            constant.
        device_type: `cpu` or `cuda`.
    """

    def __init__(self, loss_scale: float | Literal["dynamic"], device_type: str) -> None:
        self._device_type = device_type
        self._constant = None if loss_scale == "dynamic" else float(loss_scale)
        self._scaler = GradScaler(device_type, init_scale=self._constant or 2.0**16)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> Tensor:
        """Divide the gradients by the scale; return 1 where any rank found inf or NaN, else 0."""
        self._scaler.unscale_(optimizer)
        found = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:  # a rank whose slices have no gradient in this step still exchanges its flag
            none = torch.zeros((), device=self._device_type)
            found[none.device] = none
        flags = list(found.values())
        if dist.is_initialized() and dist.get_world_size() > 1:
            for flag in flags:
                dist.all_reduce(local(flag), dist.ReduceOp.MAX)
        return torch.stack([f.full_tensor() if isinstance(f, DTensor) else f for f in flags]).amax()

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters unless an overflow was found, then adapt the scale."""
        self._scaler.step(optimizer)
        self._scaler.update(self._constant)

    def state(self) -> dict[str, float]:
        """Return scale and count of good steps, for a later `restore`; reading waits for the device."""
        return dict(self._scaler.state_dict())

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` returned."""
        self._scaler.load_state_dict(state)

    @property
    def current(self) -> float:
        """The scale; reading it waits for the device."""
        return self._scaler.get_scale()


# Clipping by the norm of all gradients, where no rank has all of them.


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
    if world.shape.tensor == world.shape.pipeline == 1 and not in_slices:
        gradients = [p.grad for p in parameters if p.grad is not None]
        clip_grads_with_norm_(parameters, limit, _norm(gradients))
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
    clip_grads_with_norm_(parameters, limit, square.sqrt())


def _square(parameters: list[Tensor], world: World) -> Tensor:
    total = torch.zeros((), device=world.device, dtype=torch.float64)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return total + _norm(gradients).double().square() if gradients else total


def _norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all; torch 2.9 would add the small number of a division to each shard's part."""
    norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
