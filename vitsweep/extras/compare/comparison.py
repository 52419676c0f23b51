"""Two settings measured alternately (`vitsweep compare`): the stopping rule and the result."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log1p, nan, sqrt
from typing import Any

import numpy as np
from markupsafe import Markup
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.tables import stats
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import count, number, ratio
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import is_biased, missing_blocks_of
from vitsweep.tables.stats import MIN_BLOCKS, Claim
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_runs, keyed

MOST_BLOCKS = 10**6
"""Of a comparison that needs more the number is not computed."""


@dataclass(frozen=True)
class Comparison:
    """The ratio of two settings over blocks, with its 95 % interval (NaN where there is none)."""

    ratio: float
    low: float
    high: float
    num_blocks: int
    correlation: float = 0.0
    """Of neighbouring blocks, where it is shown."""
    is_biased: bool = False
    """The faster setting misses blocks that the other has (`speedup.is_biased`)."""
    log_ratios: Sequence[float] = field(default=(), compare=False, repr=False)
    """Of each block, the oldest first."""

    def __str__(self) -> str:
        return ratio(self.ratio, self.low, self.high)

    @property
    def half_width(self) -> float:
        """Half of the interval, relative: 0.02 for +- 2 %; NaN where there is none."""
        return self.high / self.ratio - 1

    @property
    def claim(self) -> Claim:
        """`faster, slower, missing blocks, no difference shown` or `too few blocks`."""
        if self.low != self.low:
            return Claim.too_few_blocks
        if self.low <= 1 <= self.high:
            return Claim.equal if self.low == self.high else Claim.no_difference_shown
        if self.is_biased:
            return Claim.missing_blocks
        return Claim.faster if self.low > 1 else Claim.slower

    def lies_within(self, least: float, most: float) -> bool | None:
        """Whether the interval lies within two bounds; None where it is neither within nor outside."""
        if self.low >= least and self.high <= most:
            return True
        return False if self.low > most or self.high < least else None

    def sentence(self, variant: str, baseline: str) -> str:
        """Return the result in one sentence."""
        told = {"size": str(self), "blocks": count(self.num_blocks, "block")}
        text = say("compared", name=variant, base=baseline, claim=self.claim, **told)
        return (
            f"{text} {say('autocorrelation', value=number(self.correlation))}"
            if self.correlation
            else text
        )


def compared_cells(runs: DataFrame, variant: str, baseline: str) -> Comparison:
    """Return how two cells of a sweep compare, over the blocks that its table pairs.

    On several devices it is on the one that measured the variant last. Of a cell and itself the two runs
    of each block are compared, see `_as_two_arms`.

    Args:
        runs: one row per run.
        variant: cell in the numerator.
        baseline: cell in the denominator.
    """
    if runs.empty:
        return compared(())
    runs = checked_runs(runs, "device")
    if variant == baseline:
        runs, variant, baseline = _as_two_arms(runs, variant)
    known = keyed(runs, {variant: baseline, baseline: baseline})
    own = known.valid.loc[known.valid["cell_id"] == variant, ROW]
    row = int(own.iloc[-1]) if len(own) else -1
    base = known.baselines.get(row)
    ratios = log_ratios(log_throughput_per_block(known.valid, ROW), {row: base}, ROW)
    result = compared(ratios["log_ratio"].tolist(), is_fixed=not ratios["any_look"].any())
    sides = ([row], [base]) if result.ratio > 1 else ([base], [row])
    return replace(result, is_biased=is_biased(missing_blocks_of(known.runs, ROW), *sides))


def _as_two_arms(runs: DataFrame, cell_id: str) -> tuple[DataFrame, str, str]:
    """Return the runs of a cell as those of two, and the names of these.

    Each block holds the cell twice; its random name decides which run stands for A, so that an interval
    without 1 is a false claim.
    """
    own = runs[runs["cell_id"] == cell_id]
    odd = [int(hashlib.sha256(str(block).encode()).hexdigest(), 16) % 2 for block in own["block"]]
    a, b = f"{cell_id} A", f"{cell_id} B"
    places = own["position"].fillna(0).astype(int).to_numpy() + np.array(odd, int)
    return own.assign(cell_id=np.where(places % 2, a, b)), a, b


def blocks_wanted(log_ratios: Sequence[float], half_width: float) -> int:
    """Return how many blocks make the interval at most +- `half_width` (0.02: 2 %) wide.

    That is the number of blocks there are where the interval is narrow enough. Else the spread so far
    says how many it will take; without one the answer is the least number that has an interval.

    Raises:
        VitsweepError: the width is not positive.
    """
    if half_width <= 0:
        raise VitsweepError(f"`width={half_width}` must be above 0. Try 0.02 for +- 2 %.")
    done = len(log_ratios)
    if done < MIN_BLOCKS:
        return MIN_BLOCKS
    numbers = np.unique(np.geomspace(done, MOST_BLOCKS, 1000).astype(int))
    halves = stats.any_look_half_width(stats.spread(np.array(log_ratios, float)), numbers)
    enough = numbers[halves <= log1p(half_width)]
    return int(enough[0]) if len(enough) else MOST_BLOCKS


def compared(log_ratios: Sequence[float], is_fixed: bool = False) -> Comparison:
    """Return ratio and interval from log(variant / baseline), one per block, in order.

    The interval is valid at any look (`stats.any_look_half_width`): it may be computed after each block,
    and the same command may be repeated until its interval is narrow, or claims something. Where their
    number was fixed before the first block (`is_fixed`) it is Student's t, half as wide. Below three
    blocks there is none.
    """
    num_blocks = len(log_ratios)
    middle = float(np.mean(log_ratios)) if num_blocks else nan
    if num_blocks < MIN_BLOCKS:
        return Comparison(exp(middle), nan, nan, num_blocks, log_ratios=log_ratios)
    spread = stats.spread(np.array(log_ratios, float))
    middle, spread = (0.0 if abs(value) < stats.ROUNDING else value for value in (middle, spread))
    error = float(
        stats.half_width(spread / sqrt(num_blocks), num_blocks - 1)
        if is_fixed
        else stats.any_look_half_width(spread, num_blocks)
    )
    ends = exp(middle - error), exp(middle + error)
    return Comparison(
        exp(middle), *ends, num_blocks, _correlation(log_ratios), log_ratios=log_ratios
    )


def _correlation(log_ratios: Sequence[float]) -> float:
    """Return the lag-1 correlation of blocks; 0 below 12 of them, or where its interval holds 0."""
    if len(log_ratios) < stats.BLOCKS_FOR_CORRELATION:
        return 0.0
    found, low, _ = stats.correlation_interval([np.asarray(log_ratios)[None] - np.mean(log_ratios)])
    return found if low > 0 else 0.0


def recorded_comparisons(runs: DataFrame, commands: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sentence of every pair that `vitsweep compare` measured.

    Args:
        runs: one row per run.
        commands: the commands of the sweep, oldest first; of several for one pair the latest names it.
    """
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for command in commands:
        if cells := list(command.get("baselines") or ()) if "comparison" in command else []:
            pair = cells[0], cells[-1]
            found.pop(pair, None)
            found[pair] = tuple((command["comparison"] or {}).get("names") or pair)
    results = ((compared_cells(runs, *pair), names) for pair, names in found.items())
    return [result.sentence(names[0], names[1]) for result, names in results if result.num_blocks]


def section(tables: SweepTables) -> Markup:
    """Return the sentences of a sweep's pairs for its report."""
    said = recorded_comparisons(tables.every_run, tables.commands)
    return Markup("").join(Markup("<p>{}</p>").format(sentence) for sentence in said)
