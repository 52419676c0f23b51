"""Two settings measured alternately (`vitsweep compare`): the stopping rule and the result."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log1p, nan, sqrt
from typing import Any

import numpy as np
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables import stats
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block
from vitsweep.tables.cells import following
from vitsweep.tables.formatting import count, number, times
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import is_flattered, lost_blocks
from vitsweep.tables.stats import MIN_BLOCKS, Claim
from vitsweep.tables.valid_runs import checked_runs, is_look, one_device

"""In the text of a command of `compare`."""

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
    is_flattered: bool = False
    """What some blocks lost makes the faster setting look faster than it is (`speedup.is_flattered`)."""

    @property
    def half_width(self) -> float:
        """Half of the interval, relative: 0.02 for +- 2 %; NaN where there is none."""
        return self.high / self.ratio - 1

    @property
    def claim(self) -> Claim:
        """`faster, slower, blocks lost, no difference shown` or `too few blocks`."""
        if self.low != self.low:
            return Claim.too_few_blocks
        if self.low <= 1 <= self.high:
            return Claim.equal if self.low == self.high else Claim.no_difference_shown
        if self.is_flattered:
            return Claim.blocks_lost
        return Claim.faster if self.low > 1 else Claim.slower

    def lies_within(self, least: float, most: float) -> bool | None:
        """Whether the interval lies within two bounds; None where it is neither within nor outside."""
        if self.low >= least and self.high <= most:
            return True
        return False if self.low > most or self.high < least else None

    def sentence(self, variant: str, baseline: str) -> str:
        """Return the result in one sentence."""
        has_none = self.low != self.low
        interval = "(no interval)" if has_none else f"[{self.low:.3f}, {self.high:.3f}]"
        is_wide = self.claim == Claim.no_difference_shown and self.half_width > stats.TOO_WIDE - 1
        claim = stats.INCONCLUSIVE if is_wide else self.claim
        told = {
            "size": f"{times(self.ratio)} {interval}",
            "blocks": count(self.num_blocks, "block"),
        }
        text = say("compared", name=variant, base=baseline, claim=claim, **told)
        return (
            f"{text} {say('autocorrelation', value=number(self.correlation))}"
            if self.correlation
            else text
        )


def paired(
    runs: DataFrame, variant: str, baseline: str, mixed_hardware: bool = False
) -> list[float]:
    """Return log(variant / baseline) of every block that measured both, oldest block first.

    Runs without a throughput (no step counted) are left out, and looks, which enter no interval.

    Args:
        runs: one row per run.
        variant: cell in the numerator.
        baseline: cell in the denominator.
        mixed_hardware: combine blocks of different devices.

    Raises:
        VitsweepError: blocks of different devices would be compared.
    """
    if runs.empty:
        return []
    runs = checked_runs(runs, "device")
    measured = runs[(runs["status"] == Status.measured) & ~is_look(runs)]
    of_both = measured[measured["cell_id"].isin([variant, baseline])]
    per_block = log_throughput_per_block(one_device(of_both, mixed_hardware))
    ratios = log_ratios(per_block, {variant: baseline})
    of_block = ratios.groupby(["sweep", "block"], sort=False)["log_ratio"]
    return list(map(float, of_block.mean()))


def compared_runs(
    runs: DataFrame, variant: str, baseline: str, mixed_hardware: bool = False
) -> Comparison:
    """Return `compared` of `paired`, and whether blocks that lost one setting flatter it."""
    result = compared(paired(runs, variant, baseline, mixed_hardware))
    if not result.num_blocks:
        return result
    sides = ([variant], [baseline]) if result.ratio > 1 else ([baseline], [variant])
    return replace(result, is_flattered=is_flattered(lost_blocks(checked_runs(runs)), *sides))


def blocks_wanted(log_ratios: Sequence[float], half_width: float) -> int:
    """Return how many blocks make the interval at most +- `half_width` (0.02: 2 %) wide.

    That is the number of blocks there are where the interval is narrow enough. Else the spread so far
    says how many it will take; without one the answer is the least number that has an interval.

    Raises:
        VitsweepError: the width is not positive.
    """
    if half_width <= 0:
        raise VitsweepError(f"The width must be above 0; got {half_width}. Try 0.02 for +- 2 %.")
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
        return Comparison(exp(middle), nan, nan, num_blocks)
    spread = stats.spread(np.array(log_ratios, float))
    middle, spread = (0.0 if abs(value) < stats.ROUNDING else value for value in (middle, spread))
    error = float(
        stats.half_width(spread / sqrt(num_blocks), num_blocks - 1)
        if is_fixed
        else stats.any_look_half_width(spread, num_blocks)
    )
    ends = exp(middle - error), exp(middle + error)
    return Comparison(exp(middle), *ends, num_blocks, _correlation(log_ratios))


def _correlation(log_ratios: Sequence[float]) -> float:
    """Return the lag-1 correlation of blocks; 0 below 12 of them, or where its interval holds 0."""
    if len(log_ratios) < stats.BLOCKS_FOR_CORRELATION:
        return 0.0
    found, low, _ = stats.correlation_interval([np.asarray(log_ratios)[None] - np.mean(log_ratios)])
    return found if low > 0 else 0.0


@dataclass(frozen=True)
class RecordedComparison:
    """One pair of settings that `vitsweep compare` measured.

    Attributes:
        names: A and B as typed.
        variant: cell of A; in a self-test one half of the cell's runs.
        baseline: cell of B; in a self-test the other half.
        result: the ratio over the blocks that the command used.
        is_latest: no later command names the variant's cell.
    """

    names: tuple[str, str]
    variant: str
    baseline: str
    result: Comparison
    is_latest: bool = True

    @property
    def sentences(self) -> list[str]:
        """The result in words; in a self-test also what it tests."""
        return [self.result.sentence(*self.names)]


def self_test_arms(cell_id: str) -> tuple[str, str]:
    """Return what the two halves of the runs of a cell are called that is compared with itself."""
    return f"{cell_id} A", f"{cell_id} B"


def as_self_test(runs: DataFrame) -> DataFrame:
    """Return runs of one cell with the cell ids of `self_test_arms`.

    Each block holds two runs of the cell; the block's random name decides which stands for A.

    Args:
        runs: rows `cell_id, block, position` (0 or 1 within the block).
    """

    def arm(cell_id: str, block: str, position: int) -> str:
        digest = int(hashlib.sha256(block.encode()).hexdigest(), 16)
        return self_test_arms(cell_id)[(digest + position + 1) % 2]

    if runs.empty:
        return runs
    columns = (runs["cell_id"], runs["block"].astype(str), runs["position"].fillna(0).astype(int))
    return runs.assign(cell_id=[arm(*row) for row in zip(*columns, strict=True)])


def recorded_comparisons(
    runs: DataFrame, commands: Sequence[Mapping[str, Any]]
) -> list[RecordedComparison]:
    """Return every pair that `vitsweep compare` measured, with the interval and claim it printed.

    Args:
        runs: one row per run.
        commands: the commands of the sweep, oldest first. Those of `compare` say which blocks of their
            cells they left out; of several for one pair the latest counts.
    """
    found: dict[tuple[str, str], RecordedComparison] = {}
    latest: dict[str, tuple[str, str]] = {}
    for command in commands:
        baselines = command.get("baselines") or {}
        pair = next(((c, b) for c, b in baselines.items() if b and b != c), None)
        is_comparison = "comparison" in command and len(baselines) in (1, 2)
        if is_comparison and len(baselines) == 1:
            pair = (next(iter(baselines)),) * 2
        for cell in baselines:
            latest.pop(cell, None)
        if is_comparison and pair and (shown := _recorded(runs, *pair, command)):
            found.pop(pair, None)
            found[pair] = shown
            latest[pair[0]] = pair
    return [replace(one, is_latest=latest.get(pair[0]) == pair) for pair, one in found.items()]


def _recorded(
    runs: DataFrame, variant: str, baseline: str, command: Mapping[str, Any]
) -> RecordedComparison | None:
    """Return one comparison; None without a block, or where blocks of several devices are not mixed."""
    facts = command.get("comparison") or {}
    names = tuple(facts.get("names") or (variant, baseline))
    if runs.empty:
        return None
    used = runs[runs["cell_id"].isin([variant, baseline])]
    used = used[~used["block"].isin(facts.get("left_out_blocks") or [])]
    if variant == baseline:
        used = as_self_test(used)
        variant, baseline = self_test_arms(variant)
    try:
        result = compared_runs(used, variant, baseline, bool(facts.get("mixed_hardware")))
    except VitsweepError:
        return None
    if not result.num_blocks:
        return None
    return RecordedComparison((names[0], names[1]), variant, baseline, result)


def with_comparisons(
    cells: DataFrame, runs: DataFrame, commands: Sequence[Mapping[str, Any]]
) -> DataFrame:
    """Give cells that `vitsweep compare` measured the interval and claim that it printed.

    It is over the blocks that the command used: see `compared`. Throughput follows the speedup, as in
    every table.

    Args:
        cells: one row per cell.
        runs: one row per run.
        commands: the commands of the sweep, oldest first; the latest one that names a cell counts.
    """
    if runs.empty or cells.empty:
        return cells
    for pair in recorded_comparisons(runs, commands):
        rows = (cells["cell_id"] == pair.variant) & (cells["num_pairs"].fillna(0) > 0)
        if rows.sum() != 1 or not pair.is_latest:
            continue  # on several devices each has its own row, of a fixed number of blocks
        result = pair.result
        ends = {"low": result.low, "high": result.high}
        values: dict[str, float | str] = {
            f"{name}_{end}": v for name in ("speedup", "claim") for end, v in ends.items()
        }
        values |= {
            "speedup": result.ratio,
            "num_pairs": result.num_blocks,
            "claim": str(result.claim),
        }
        values |= {"p_value": nan, "p_holm": nan}
        factor = (result.ratio / cells["speedup"].astype(float)).where(rows, 1.0)
        shown = {c: cells[c].mask(rows, v) for c, v in values.items()}
        cells = following(cells, factor).assign(**shown)
    return cells
