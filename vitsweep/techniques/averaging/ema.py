"""The weights as they are, or their exponential moving average."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.model_variant import Averaging

if TYPE_CHECKING:
    from torch import Tensor

Decay = float | Callable[[int, int | None], float]


@dataclass(frozen=True, kw_only=True)
class Ema(Averaging):
    """Exponential moving average of the weights (Polyak and Juditsky, 1992; DeiT trains with it).

    average <- decay x average + (1 - decay) x weights, in float32 at least, for whatever this rank
    updates: shards and slices are averaged where they are, nothing is gathered. All tensors in a few
    calls (`torch._foreach_lerp_`). Memory: 4 bytes per parameter held; no bytes are sent until
    evaluation; no matrix product. BatchNorm's running statistics are not averaged again.

    Attributes:
        decay: of the average in each update.
        warmup: start with a lower decay, (1 + t) / (10 + t) in update t, as TensorFlow's
            ExponentialMovingAverage does, so that the first weights are soon forgotten.
        every: optimizer steps between updates.
    """

    decay: Annotated[float, Ge(0), Lt(1)]
    warmup: bool
    every: Annotated[int, Gt(0)]

    def build(self, weights: "list[Tensor]") -> "MovingAverage":
        """Return the average, which begins as a copy of the weights."""
        return MovingAverage(weights, self.decay, warmup=self.warmup, every=self.every)

    def checks(self) -> "tuple[AverageCheck]":
        """Return the comparison of the average with its equation."""
        return (AverageCheck(self),)


class AverageCheck:
    """Compares the weights that evaluation would read with their average in float64, over whole tensors.

    Each update that is skipped, since the loss scale is too high, averages the weights before it again.

    Args:
        choice: gives decay, warm-up and steps between updates.
    """

    def __init__(self, choice: Ema) -> None:
        self._choice = choice
        self._average: dict[str, Tensor] = {}

    def __call__(self, found: Any, expected: Any, bounds: Any) -> str:
        """Return what differs after a step (see `vitsweep.proof`)."""
        import torch

        choice, number = self._choice, found.step // self._choice.every
        kept = self._average or found.before
        average = {n: a.to(torch.promote_types(a.dtype, torch.float64)) for n, a in kept.items()}
        decay = min(choice.decay, (1 + number) / (10 + number)) if choice.warmup else choice.decay
        averaged = [] if (found.step + 1) % choice.every else [found.weights]
        for weights in [found.before] * found.repeats * len(averaged) + averaged:
            for n, a in average.items():
                average[n] = decay * a + (1 - decay) * weights[n].to(a.dtype)
        self._average = average
        moved = {n: a - found.weights[n].to(a.dtype) for n, a in average.items()}
        allowed = bounds.update(moved, average, roundings=4)
        return bounds.apart("average of the weights", found.averaged(), average, allowed)


class MovingAverage:
    """average <- decay x average + (1 - decay) x weights.

    Args:
        weights: to be averaged, or shards of them; they keep their memory.
        decay: of the average in each update; or what it is after a step, of so many (None: not known).
        warmup: use (1 + t) / (10 + t) in update t as long as it is less than `decay`.
        every: optimizer steps between updates.

    Attributes:
        averages: one of each weight, in float32 or better.
    """

    def __init__(
        self, weights: "list[Tensor]", decay: "Decay", *, warmup: bool = False, every: int = 1
    ) -> None:
        from vitsweep.collectives.primitives import local

        self._decay, self._warmup, self._every = decay, warmup, every
        self._weights = [local(weight.detach()) for weight in weights]
        self.averages = [_wide(weight) for weight in self._weights]
        pairs = list(zip(self.averages, self._weights, strict=True))
        self._kept: list[Tensor] = []
        self._alike = _columns([pair for pair in pairs if pair[0].dtype == pair[1].dtype])
        self._narrow = _columns([pair for pair in pairs if pair[0].dtype != pair[1].dtype])

    def update(self, step: int, total: int | None = None) -> None:
        """Let the weights after optimizer step `step` of `total`, counted from 0, enter the average."""
        import torch

        if (step + 1) % self._every:
            return
        number = step // self._every
        decay = self._decay(step, total) if callable(self._decay) else self._decay
        decay = min(decay, (1 + number) / (10 + number)) if self._warmup else decay
        with torch.no_grad():
            averages, weights = self._alike
            if averages:
                torch._foreach_lerp_(averages, weights, 1 - decay)
            averages, weights = self._narrow
            if averages:
                torch._foreach_mul_(averages, decay)
                torch._foreach_add_(averages, weights, alpha=1 - decay)

    def enter(self) -> None:
        """Put the averages into the weights, rounded where these are below float32."""
        import torch

        with torch.no_grad():
            self._kept = [weight.clone() for weight in self._weights]
            torch._foreach_copy_(self._weights, self.averages)

    def leave(self) -> None:
        """Put the weights back that were there before `enter`."""
        import torch

        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._kept)
            self._kept = []


def _columns(pairs: "list[tuple[Tensor, Tensor]]") -> "tuple[list[Tensor], list[Tensor]]":
    return [average for average, _ in pairs], [weight for _, weight in pairs]


def _wide(weight: "Tensor") -> "Tensor":
    import torch

    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
