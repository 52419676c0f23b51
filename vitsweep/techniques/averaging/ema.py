"""The weights as they are, or their exponential moving average."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.model_variant import Averaging, WeightAverage

if TYPE_CHECKING:
    from torch import Tensor

    from vitsweep.spec.cell_spec import CellSpec


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

    def build(self, weights: "list[Tensor]") -> WeightAverage:
        """Return the average, which begins as a copy of the weights."""
        from vitsweep.techniques.averaging.moving_average import MovingAverage

        return MovingAverage(weights, self.decay, warmup=self.warmup, every=self.every)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse numbers that change from step to step where a step is recorded once."""
        if cell.compilation.captures_step and (self.warmup or self.every > 1):
            knob = "averaging.warmup=true" if self.warmup else f"averaging.every={self.every}"
            yield (
                f"`{knob}` changes what a step does, and `compilation={cell.compilation.name}` "
                "replays one recorded step: use `averaging.warmup=false` with `averaging.every=1`."
            )
