"""Two settings measured alternately (`vitsweep compare`): the stopping rule and the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, log1p, nan, sqrt

import numpy as np
from pandas import DataFrame
from scipy.special import stdtrit

from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, times
from vitsweep.tables.ratios import LEVEL, MIN_BLOCKS, log_ratios, log_throughput_per_block
from vitsweep.tables.status import in_order
from vitsweep.tables.tidy import one_device

PILOT = 6
"""The spread of the first blocks decides how many are needed in total (Stein 1945)."""


@dataclass(frozen=True)
class Comparison:
    """The ratio of two settings over blocks, with its 95 % interval (NaN where there is none)."""

    ratio: float
    low: float
    high: float
    num_blocks: int

    @property
    def half_width(self) -> float:
        """Half of the interval, relative: 0.02 for +- 2 %; NaN where there is none."""
        return self.high / self.ratio - 1

    @property
    def claim(self) -> str:
        """`faster, slower, no difference shown` or `too few blocks`."""
        if self.low != self.low:
            return "too few blocks"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "no difference shown"

    def sentence(self, variant: str, baseline: str) -> str:
        """Return the result in one sentence."""
        interval = "" if self.low != self.low else f" [{self.low:.3f}, {self.high:.3f}]"
        size = f"{times(self.ratio)}{interval} the throughput of {baseline}"
        return f"{variant} has {size} over {count(self.num_blocks, 'block')}: {self.claim}."


def paired(
    runs: DataFrame, variant: str, baseline: str, mixed_hardware: bool = False
) -> list[float]:
    """Return log(variant / baseline) of every block that measured both, oldest block first.

    Runs without a throughput (no step counted) are left out.

    Args:
        runs: one row per run.
        variant: cell in the numerator.
        baseline: cell in the denominator.
        mixed_hardware: combine blocks of different devices.

    Raises:
        VitsweepError: blocks of different devices would be compared.
    """
    if runs.empty or "images_per_second" not in runs:
        return []
    measured = in_order(runs[runs["status"] == Status.measured])
    of_both = measured[measured["cell_id"].isin([variant, baseline])]
    per_block = log_throughput_per_block(one_device(of_both, mixed_hardware))
    ratios = log_ratios(per_block, {variant: baseline}).set_index(["sweep", "block"])["log_ratio"]
    begun = of_both[["sweep", "block"]].drop_duplicates().itertuples(index=False, name=None)
    return [float(ratios[block]) for block in begun if block in ratios.index]


def blocks_wanted(log_ratios: Sequence[float], half_width: float) -> int:
    """Return how many blocks make the interval at most +- `half_width` (0.02: 2 %) wide.

    Stein (1945): the spread of the first `PILOT` blocks decides, and nothing later does. Looking at
    the width after every block instead stops where the spread happens to look small: simulated, the
    95 % interval then covers 92 %. With fewer than `PILOT` blocks the answer is `PILOT`.

    Blocks must be independent. Drift cancels within a block; where the ratios of neighbouring
    blocks still correlate by 0.3, the interval covers 87 % only.

    Raises:
        VitsweepError: the width is not positive.
    """
    if half_width <= 0:
        raise VitsweepError(f"The width must be above 0; got {half_width}. Try 0.02 for +- 2 %.")
    if len(log_ratios) < PILOT:
        return PILOT
    quantile = float(stdtrit(PILOT - 1.0, 1 - LEVEL / 2))
    return max(PILOT, ceil((quantile * _spread(log_ratios[:PILOT]) / log1p(half_width)) ** 2))


def compared(log_ratios: Sequence[float]) -> Comparison:
    """Return ratio and interval from log(variant / baseline), one per block, in order.

    From `PILOT` blocks on the spread is that of the pilot, so that the interval covers 95 % however
    many blocks `blocks_wanted` returned and wherever a budget stopped. With fewer blocks the
    spread is that of all; below three blocks there is no interval.
    """
    num_blocks = len(log_ratios)
    middle = float(np.mean(log_ratios)) if num_blocks else nan
    if num_blocks < MIN_BLOCKS:
        return Comparison(exp(middle), nan, nan, num_blocks)
    pilot = log_ratios[:PILOT]
    quantile = float(stdtrit(len(pilot) - 1.0, 1 - LEVEL / 2))
    error = quantile * _spread(pilot) / sqrt(num_blocks)
    return Comparison(exp(middle), exp(middle - error), exp(middle + error), num_blocks)


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1))
