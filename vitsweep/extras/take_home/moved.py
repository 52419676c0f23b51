"""From one training to another of the same model and optimizer, without a file."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from vitsweep.collectives.primitives import gathered, gathered_tensors
from vitsweep.model.initialize import plain_name
from vitsweep.model.module_look import follow
from vitsweep.training import checkpoint
from vitsweep.training.trainer import Trainer

Box = tuple[Sequence[int], Tensor]
"""Where it begins in a whole tensor, by axis, and its numbers."""


def move(source: Trainer, to: Trainer) -> None:
    """Let a training go on from another one's state; every rank calls it.

    Weights (masters where there are any), buffers, optimizer state and averages are copied bit for bit into
    the memory of the other training, which may split them over the ranks differently. So are buffers that
    are not persistent. Numbers of parameter groups, modes of modules, frozen parameters and the step are
    carried over; the state of a loss scaler stays with its setting.

    Args:
        source: stays as it is.
        to: of the same model and optimizer, with tensors of the same types.
    """
    own, held = _boxes(source), _boxes(to)
    sides = zip(*gathered([[*own], [*held]]), strict=True)
    names, there = ({name for rank in side for name in rank} for side in sides)
    if any(name.startswith(checkpoint.OPTIMIZER) for name in names - there):
        checkpoint.allocate_state(to.optimizer)
        held = _boxes(to)
    wanted = {name: boxes for name, boxes in held.items() if name in names}
    lacking = [name for name, boxes in wanted.items() if not _covers(own.get(name, ()), boxes)]
    exchanged = {name for rank in gathered(lacking) for name in rank}
    for name in sorted(names):
        boxes = own.get(name, [])
        if name in exchanged:
            parts = gathered_tensors({json.dumps(at): t.to(to.world.device) for at, t in boxes})
            boxes = [(json.loads(at), t) for rank in parts for at, t in rank.items()]
        for target in wanted.get(name, ()):
            for box in boxes:
                if both := _common(target, box):
                    target[1][both[0]].copy_(box[1][both[1]])
    follow(to.model, source.model)
    unsaved = {plain_name(name): buffer for name, buffer in source.model.named_buffers()}
    for name, buffer in to.model.named_buffers():
        other = unsaved.get(plain_name(name), buffer)
        if f"model.{plain_name(name)}" in names or buffer.shape != other.shape:
            continue
        if not torch.equal(buffer.to(other.dtype), other):  # a table keeps its digits
            buffer.copy_(other)
    checkpoint.give_extra_state(
        to.model, (shard for shard in checkpoint.shards_of_training(to) if shard.name in names)
    )
    checkpoint.complete_loading(to, names, {}, checkpoint.numbers(source)["groups"])
    to.non_finite.copy_(source.non_finite)
    to.steps_taken = source.steps_taken


def _boxes(trainer: Trainer) -> dict[str, list[Box]]:
    """Return the boxes in this rank's memory by the name of the whole tensor."""
    found: dict[str, list[Box]] = {}
    for shard in checkpoint.shards_of_training(trainer):
        found.setdefault(shard.name, []).append((shard.offsets, shard.values))
    return found


def _covers(boxes: Sequence[Box], wanted: Sequence[Box]) -> bool:
    """Whether a rank's own boxes, of which no two overlap, hold all numbers of others."""
    pairs = [(target[1], _common(target, box)) for target in wanted for box in boxes]
    held = sum(values[both[0]].numel() for values, both in pairs if both)
    return held == sum(values.numel() for _, values in wanted)


def _common(*boxes: Box) -> list[tuple[slice, ...]]:
    """Return where two boxes of a tensor overlap, in each of them; nothing where they do not."""
    axes = zip(*(zip(at, t.shape, strict=True) for at, t in boxes), strict=True)
    cuts = [(max(i, j), min(i + m, j + n)) for (i, m), (j, n) in axes]
    if any(low >= high for low, high in cuts):
        return []
    ways = [zip(cuts, at, strict=True) for at, _ in boxes]
    return [tuple(slice(low - i, high - i) for (low, high), i in way) for way in ways]
