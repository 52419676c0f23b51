"""Weights that a training leaves as they are although they have a gradient (needs torch).

An update of less than half a rounding step of its weight is lost: AdamW with a learning rate of 1e-4 never
moves a bfloat16 weight of 1.0, whose neighbours lie 0.004 and 0.008 away, and the loss may fall all the same.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import Tensor

from vitsweep.collectives.primitives import local
from vitsweep.training.shards import Offsets, Shard, is_plain, updated
from vitsweep.training.trainer import Trainer

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
            if gradient is None or not is_plain(weights):
                continue
            pairs = zip(each.views(weights), each.views(local(gradient)), strict=True)
            for shard, of_gradient in pairs:
                has_gradient = _some(of_gradient.values) != 0
                kept[shard.name, shard.offsets] = _some(shard.values).clone(), has_gradient

    def compare() -> Unmoved:
        found: Unmoved = defaultdict(lambda: [0.0, 0.0])
        for shard in _shards(trainer):
            if (shard.name, shard.offsets) in kept:
                before, has_gradient = kept[shard.name, shard.offsets]
                still = has_gradient & (_some(shard.values) == before)
                for index, which in enumerate((has_gradient, still)):
                    found[shard.name][index] += float(which.double().mean()) * shard.values.numel()
        return dict(found)

    trainer.before_update = take
    return compare


def _shards(trainer: Trainer) -> Iterator[Shard]:
    for each in updated(trainer):
        if is_plain(weights := local(each.tensor).detach()):
            yield from each.views(weights)


def _some(values: Tensor) -> Tensor:
    # An odd stride meets all columns of a matrix.
    return values.detach().reshape(-1)[:: -(-values.numel() // MOST) | 1]
