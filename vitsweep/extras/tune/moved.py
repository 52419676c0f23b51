"""The state of a training under one setting, moved to another one, tensor by tensor."""

from collections import defaultdict
from collections.abc import Sequence

from vitsweep.collectives.primitives import gathered, gathered_tensors
from vitsweep.model.module_look import follow
from vitsweep.training.checkpoint import (
    OPTIMIZER,
    allocate_state,
    complete_loading,
    give_extra_state,
    numbers,
    shards_of_training,
    state_dict_of,
)
from vitsweep.training.shards import Shard
from vitsweep.training.trainer import Trainer

Boxes = dict[str, list[Shard]]
"""Name of a whole tensor -> the boxes of it in this rank's memory."""
Slices = tuple[slice, ...]


def move(source: Trainer, to: Trainer) -> None:
    """Let a training go on from another one's state; every rank calls it.

    Weights (masters where there are any), buffers, optimizer state and averages are copied bit for bit into
    the memory of the other training, which may split them over the ranks differently. Numbers of parameter
    groups, modes of modules, frozen parameters and the step are carried over; the state of a loss scaler
    stays with its setting.

    Args:
        source: stays as it is.
        to: of the same model and optimizer, with tensors of the same types.
    """
    own, held = _boxes(source), _boxes(to)
    sides = zip(*gathered([[*own], [*held]]), strict=True)
    names, there = ({name for rank in side for name in rank} for side in sides)
    if any(name.startswith(OPTIMIZER) for name in names - there):
        allocate_state(to.optimizer)
        held = _boxes(to)
    wanted = {name: boxes for name, boxes in held.items() if name in names}
    lacking = [name for name, boxes in wanted.items() if not _covers(own.get(name, ()), boxes)]
    exchanged = {name for rank in gathered(lacking) for name in rank}
    for name in sorted(names):
        boxes = own.get(name, [])
        if name in exchanged:
            boxes = _of_all_ranks(boxes, name, to)
        for target in wanted.get(name, ()):
            for box in boxes:
                if both := _common(target, box):
                    target.values[both[0]].copy_(box.values[both[1]])
    follow(to.model, source.model)
    give_extra_state(to.model, (box for boxes in wanted.values() for box in boxes))
    complete_loading(to, names, {}, numbers(source)["groups"])
    to.non_finite.copy_(source.non_finite)
    to.steps_taken = source.steps_taken


def _boxes(trainer: Trainer) -> Boxes:
    found: Boxes = defaultdict(list)
    for shard in shards_of_training(trainer):
        found[shard.name].append(shard)
    return dict(found)


def _of_all_ranks(boxes: Sequence[Shard], name: str, trainer: Trainer) -> list[Shard]:
    held = {k: t.to(trainer.world.device) for k, t in state_dict_of(boxes).items()}
    return [
        Shard(name, (), tuple(map(int, filter(None, key.rpartition("@")[2].split(",")))), values)
        for rank in gathered_tensors(held)
        for key, values in rank.items()
    ]


def _covers(boxes: Sequence[Shard], wanted: Sequence[Shard]) -> bool:
    """Whether a rank's own boxes, of which no two overlap, hold all numbers of others."""
    pairs = [(target, _common(target, box)) for target in wanted for box in boxes]
    held = sum(target.values[both[0]].numel() for target, both in pairs if both)
    return held == sum(target.values.numel() for target in wanted)


def _common(a: Shard, b: Shard) -> tuple[Slices, Slices] | None:
    """Return where two boxes of a tensor overlap, in each of them; None where they do not."""
    low = [max(pair) for pair in zip(a.offsets, b.offsets, strict=True)]
    ends = zip(a.offsets, a.values.shape, b.offsets, b.values.shape, strict=True)
    high = [min(i + m, j + n) for i, m, j, n in ends]
    if any(begin >= end for begin, end in zip(low, high, strict=True)):
        return None
    return tuple(
        tuple(slice(b - o, e - o) for b, e, o in zip(low, high, box.offsets, strict=True))
        for box in (a, b)
    )  # type: ignore[return-value]
