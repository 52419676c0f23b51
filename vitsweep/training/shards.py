"""Which boxes of the model's whole tensors lie in a rank's memory, whatever techniques split them.

A checkpoint holds whole tensors under the reference model's names, in boxes. So it can be read by any
number of ranks under any sharding: each reads the boxes that overlap with its own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitsweep.collectives.parallel_linear import (
    Block,
    ColumnParallelLinear,
    SplitLinear,
    split_over_ranks,
)
from vitsweep.collectives.primitives import gathered, gathered_tensors, local
from vitsweep.model.initialize import named_generator, plain_name
from vitsweep.spec.generators import named_seed
from vitsweep.techniques.optimizer.flat_buffer import FlatBuffer
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A box of a whole tensor in this rank's memory.

    Attributes:
        name: of the whole tensor.
        shape: of the whole tensor.
        offsets: where the box begins in it, by axis.
        values: view of this rank's memory with the shape of the box.
    """

    name: str
    shape: tuple[int, ...]
    offsets: Offsets
    values: Tensor


@dataclass(frozen=True)
class _Part:
    """What a rank has of a parameter before its data-parallel group shards it.

    Attributes:
        parameter: of the model, perhaps a DTensor.
        shape: of the whole parameter.
        blocks: of a matrix that is split over ranks; empty where the part is the whole.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    blocks: tuple[Block, ...] = ()

    def in_whole(self, offsets: Offsets, values: Tensor) -> Iterator[tuple[Offsets, Tensor]]:
        """Cut a box of the part whose blocks are not contiguous in the whole; yield each with its place."""
        if not self.blocks:
            yield offsets, values
        for block in self.blocks:
            axis = block.axis
            begin, length = offsets[axis], values.shape[axis]
            low, high = (
                max(begin, block.in_part),
                min(begin + length, block.in_part + block.length),
            )
            if low < high:
                place = list(offsets)
                place[axis] = block.in_whole + low - block.in_part
                yield tuple(place), values.narrow(axis, low - begin, high - low)


@dataclass(frozen=True)
class Updated:
    """A tensor that the optimizer updates, and which parameters of the model lie in it.

    Attributes:
        tensor: a parameter or a shard of it, a slice of it (ZeRO-1), or many in a flat buffer.
        names: names in the reference model of these parameters.
        views: a tensor of this rank's, of the shape of `tensor` -> the shards in it.
    """

    tensor: nn.Parameter
    names: tuple[str, ...]
    views: Callable[[Tensor], list[Shard]]

    def shards(self, kind: str, values: Tensor) -> Iterator[Shard]:
        """Yield the shards of a tensor such as `exp_avg` that belongs to this one.

        Args:
            kind: begins their names.
            values: with the shape of `tensor`, or a single number that belongs to it as a whole.
        """
        held = local(values)
        if held.shape == local(self.tensor).shape:
            for shard in self.views(held.detach()):
                yield replace(shard, name=f"{kind}.{shard.name}")
            return
        for name in self.names:
            yield whole(f"{kind}.{name}", held)


def whole(name: str, values: Tensor) -> Shard:
    """Return the shard that is all of a tensor."""
    return Shard(name, tuple(values.shape), (0,) * values.ndim, values.detach())


def updated(trainer: Trainer) -> list[Updated]:
    """Return what the optimizer of this rank updates, in its order."""
    parts = dict(_parts(trainer.model))
    buffers = {buffer.parameter: buffer for buffer in getattr(trainer.optimizer, "buffers", ())}
    found = []
    views: Callable[[Tensor], list[Shard]]
    for group in trainer.optimizer.param_groups:
        starts = group.get("starts") or [None] * len(group["params"])
        for index, tensor in enumerate(group["params"]):
            if tensor in buffers:
                names = buffers[tensor].names
                views = partial(_of_buffer, buffers[tensor], [(n, parts[n]) for n in names])
                found.append(Updated(tensor, tuple(names), views))
                continue
            name = group["names"][index]
            views = partial(_of_parameter, name, parts[name], starts[index])
            found.append(Updated(tensor, (name,), views))
    return found


def untouched(trainer: Trainer) -> Iterator[Shard]:
    """Yield what no rank's optimizer was given of the model: frozen parameters and buffers."""
    given = trainer.trained.names if trainer.trained else None  # and may be frozen since
    for name, part in _parts(trainer.model):
        if not part.parameter.requires_grad if given is None else name not in given:
            place = _place(part.parameter)
            for offsets, values in part.in_whole(place, local(part.parameter).detach()):
                yield Shard(f"model.{name}", part.shape, offsets, values)
    parameters = {name for name, _ in trainer.model.named_parameters(remove_duplicate=False)}
    for name, value in trainer.model.state_dict().items():
        if name not in parameters and isinstance(value, Tensor):
            yield whole(f"model.{plain_name(name)}", value)


def _parts(model: nn.Module) -> Iterator[tuple[str, _Part]]:
    split, modules = split_over_ranks(model), dict(model.named_modules())
    for name, parameter in model.named_parameters():
        part = _Part(parameter, tuple(parameter.shape))
        if name in split:
            path, _, own = name.rpartition(".")
            linear = modules[path]
            assert isinstance(linear, SplitLinear)
            part = _Part(parameter, linear.whole_shape(own), tuple(linear.blocks(own)))
        yield plain_name(name), part


def _place(tensor: Tensor) -> Offsets:
    """Return where this rank's numbers of a tensor begin, by axis."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    # Private to torch, and imported only where a checkpoint of shards is written.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets)


def _of_parameter(name: str, part: _Part, start: int | None, values: Tensor) -> list[Shard]:
    """Return the shards in `values`, which is held as the optimizer's tensor is."""
    boxes_of_part = (
        [(_place(part.parameter), values)]
        if start is None
        else _boxes_of_run(values, part.parameter, start)
    )
    return [
        Shard(name, part.shape, offsets, box)
        for place, of_part in boxes_of_part
        for offsets, box in part.in_whole(place, of_part)
        if box.numel()
    ]


def _of_buffer(buffer: FlatBuffer, parts: list[tuple[str, _Part]], values: Tensor) -> list[Shard]:
    return [
        Shard(name, part.shape, offsets, box)
        for (name, part), view in zip(parts, buffer.views(values), strict=True)
        for offsets, box in part.in_whole((0,) * view.ndim, view)
    ]


def _boxes_of_run(values: Tensor, like: Tensor, start: int) -> list[tuple[Offsets, Tensor]]:
    """Cut consecutive numbers of a tensor into boxes of it.

    Args:
        values: the numbers, (N,).
        like: a tensor of the shape and the order in memory (channels_last) of that tensor.
        start: which number in the order of memory the first one is.
    """
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda axis: -strides[axis])
    back = [order.index(axis) for axis in range(like.ndim)]
    found, used = [], 0
    for offsets, sizes in boxes(tuple(like.shape[a] for a in order), start, start + values.numel()):
        view = values[used : used + prod(sizes)].view(sizes).permute(back)
        found.append((tuple(offsets[axis] for axis in back), view))
        used += prod(sizes)
    return found


def boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Cut the numbers `low` to `high` of a row-major tensor into boxes.

    Returns:
        Offsets and sizes of each box, in the order of the numbers: at most 2 n - 1 for n axes.
    """
    if low >= high:
        return
    if not shape:
        yield (), ()
        return
    row, rest = prod(shape[1:]), shape[1:]
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # all within one row
        first = last = low // row
        yield from _in_row(rest, first, low - first * row, high - first * row)
        return
    yield from _in_row(rest, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(rest, last, 0, high - last * row)


def _in_row(
    shape: tuple[int, ...], row: int, low: int, high: int
) -> Iterator[tuple[Offsets, Offsets]]:
    for offsets, sizes in boxes(shape, low, high):
        yield (row, *offsets), (1, *sizes)


# Whole tensors by the reference model's names, joined from shards, split matrices and pipeline stages.


Named = dict[str, Tensor]


def whole_tensors(
    trainer: Trainer,
    read: Callable[[nn.Parameter], Tensor | None],
    keep: Callable[[Tensor], Tensor | None] = lambda tensor: tensor,
) -> Named:
    """Return what `read` gives for each parameter (itself, its gradient), whole, on every rank.

    Every rank must call it: shards are gathered over their ranks, parts of split matrices over the
    tensor-parallel ones, and stages over the pipeline. What `read` gives None for is left out.

    Args:
        trainer: of the parameters.
        read: takes a parameter.
        keep: takes each tensor as soon as it is whole; what it gives None for is freed and left out. The
            tensors of a pipeline's stage are whole together.
    """
    in_stages = trainer.world.shape.pipeline > 1
    found = {n: t if in_stages else keep(t) for n, t in whole_tensors_here(trainer, read)}
    held = {name: value for name, value in found.items() if value is not None}
    if not in_stages:
        return held
    stages = gathered_tensors(held, trainer.world.axis("pipeline").get_group(), keep)
    return {name: value for stage in stages for name, value in stage.items()}


def whole_tensors_here(
    trainer: Trainer, read: Callable[[nn.Parameter], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `whole_tensors` returns of this rank's own stage, one tensor after the other.

    Every rank must take all of them.
    """
    trainer.reshard()  # `state_dict` would free gathered parameters that were read before
    model = trainer.model
    split, modules = split_over_ranks(model), dict(model.named_modules())
    for name, parameter in model.named_parameters():
        value: Any = read(parameter)
        if value is None:
            continue
        value = value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
        if name in split:
            value = _joined(value, modules[name.rpartition(".")[0]], trainer.world)
        yield plain_name(name), value


def plain_weights(trainer: Trainer, *, on_first: bool = False) -> Named:
    """Return copies of all weights and buffers, whole and on the host, named as before any technique.

    A tied parameter is there under each of its names.

    Every rank must call it. Running statistics are this rank's.

    Args:
        trainer: of the weights.
        on_first: only the first rank gets them, and so no other host needs room for a whole model.
    """
    wanted = not on_first or trainer.world.rank == 0

    def copied(tensor: Tensor) -> Tensor | None:
        return tensor.detach().to("cpu", copy=True).contiguous() if wanted else None

    found = whole_tensors(trainer, lambda parameter: parameter, copied)
    if not wanted:
        return {}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, plain_name(name))
        found.setdefault(plain_name(name), found[known].clone())
    for shard in untouched(trainer):
        name = shard.name.removeprefix("model.")
        if name not in found:
            found[name] = shard.values.to("cpu", copy=True).contiguous()
    return {trainer.names.get(name, name): value for name, value in found.items()}


def _joined(part: Tensor, linear: nn.Module, world: World) -> Tensor:
    group = world.axis("tensor").get_group()
    pieces = [found["part"] for found in gathered_tensors({"part": part}, group)]
    if not isinstance(linear, ColumnParallelLinear):
        return torch.cat(pieces, 1)
    # What is fused (q, k and v) is cut for itself.
    return torch.cat([p.unflatten(0, (linear.parts, -1)) for p in pieces], 1).flatten(0, 1)


# The gradients of a step in five numbers, which differ where gradients do, whatever the technique.


SKETCH_COLUMNS, SKETCHES = 2**16, 4
SMALL = 1e-3
"""Share of the norm of all gradients below which one hardly counts: true zeros, as of the key's bias."""


def sketch_next_gradients(trainer: Trainer) -> Callable[[], list[float]]:
    """Sketch the gradients of the next update, as the optimizer is given them, tensor by tensor.

    Args:
        trainer: of this rank; every rank calls this function and what it returns.

    Returns:
        A function that returns the sketch once that step was taken: the norm of all gradients, and numbers
        that differ between two ways to take the step by about as much as gradients do, in parts of each
        tensor's norm (root mean square over tensors). They are independent of a common factor of all
        gradients. Empty where a gradient is not finite, as of an update that the loss scaler skips.
    """
    found: dict[str, Tensor] = {}

    def take() -> None:
        trainer.before_update = None
        drawn = torch.randint(2, (SKETCH_COLUMNS, SKETCHES), generator=named_generator(0, "sketch"))
        signs = (2.0 * drawn - 1).to(trainer.world.device)
        for name, gradient in whole_tensors_here(trainer, trainer.gradient_of):
            found[name] = _norm_and_projections(gradient, signs)

    def sketch() -> list[float]:
        own = {name: numbers.tolist() for name, numbers in found.items()}
        if trainer.world.shape.pipeline == 1:
            return _sketch(own)
        stages = gathered(own, trainer.world.axis("pipeline").get_group())
        return _sketch({name: numbers for stage in stages for name, numbers in stage.items()})

    trainer.before_update = take
    return sketch


def _norm_and_projections(gradient: Tensor, signs: Tensor) -> Tensor:
    """Return the norm of a tensor and its products with random signs, (1 + SKETCHES,) in float64.

    A sign of the flat tensor, cut into rows, is that of its column times that of its row, so that
    products take as long as reading does.
    """
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).flatten()
    flat = flat if flat.dtype == torch.float64 else flat.float()
    whole, columns = len(flat) // len(signs) * len(signs), signs.to(flat.dtype)
    rows, rest = flat[:whole].view(-1, len(signs)), flat[whole:]
    products = torch.cat([rows @ columns, (rest @ columns[: len(rest)])[None]]).double()
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return torch.cat([norm[None], (products * signs.flip(0)[: len(products)]).sum(0)])


def _sketch(tensors: Mapping[str, list[float]]) -> list[float]:
    """Combine the norms and projections of tensors, each with signs that follow from its name.

    A length counts as its logarithm, so that a factor counts as much as an error of another direction.
    """
    if not tensors:
        return []
    numbers = torch.tensor(list(tensors.values()), dtype=torch.float64)
    norms, projections = numbers[:, :1], numbers[:, 1:]
    least = SMALL * norms.norm()
    if not 0 < float(least) < math.inf:
        return []
    lengths = (norms.square() + least.square()).sqrt()  # grow smoothly from `least`
    seeds = torch.tensor([named_seed(0, name) for name in tensors])[:, None]
    signs = 1.0 - 2 * (seeds >> torch.arange(SKETCHES) & 1)
    terms = signs * (projections / lengths + (lengths / least).log())
    return [float(norms.norm()), *(terms.sum(0) / (norms / lengths).norm()).tolist()]


# Weights that a training leaves as they are although they have a gradient.
#
# An update of less than half a rounding step of its weight is lost: AdamW with a learning rate of 1e-4 never
# moves a bfloat16 weight of 1.0, whose neighbours lie 0.004 and 0.008 away, and the loss may fall all the
# same.


MOST = 2**12
"""Numbers of a tensor that are looked at, evenly spaced."""

Unmoved = dict[str, list[float]]
"""Name of a parameter -> its numbers with a gradient on this rank, and those of them that did not move."""


def watch_weights(trainer: Trainer) -> Callable[[], Unmoved]:
    """Remember the weights before the next update, as the optimizer keeps them: masters where it has them.

    Returns:
        A function that compares them with the weights of its call.
    """
    earlier = trainer.before_update
    kept: dict[tuple[str, Offsets], tuple[Tensor, Tensor]] = {}

    def take() -> None:
        if earlier:
            earlier()
        trainer.before_update = None
        for each in updated(trainer):
            weights, gradient = local(each.tensor).detach(), each.tensor.grad
            if gradient is None:
                continue
            pairs = zip(each.views(weights), each.views(local(gradient)), strict=True)
            for shard, of_gradient in pairs:
                has_gradient = _some(of_gradient.values) != 0
                kept[shard.name, shard.offsets] = _some(shard.values).clone(), has_gradient

    def compare() -> Unmoved:
        found: Unmoved = defaultdict(lambda: [0.0, 0.0])
        shards = (s for each in updated(trainer) for s in each.views(local(each.tensor).detach()))
        for shard in shards:
            if (shard.name, shard.offsets) in kept:
                before, has_gradient = kept[shard.name, shard.offsets]
                still = has_gradient & (_some(shard.values) == before)
                for index, which in enumerate((has_gradient, still)):
                    found[shard.name][index] += float(which.double().mean()) * shard.values.numel()
        return dict(found)

    trainer.before_update = take
    return compare


def _some(values: Tensor) -> Tensor:
    # An odd stride meets all columns of a matrix.
    return values.detach().reshape(-1)[:: -(-values.numel() // MOST) | 1]
