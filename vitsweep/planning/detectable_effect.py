"""What a sweep can show before it runs: the smallest difference that its blocks would reveal."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import expm1, inf, sqrt

from pandas import DataFrame

from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import RunRecord, Status
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block
from vitsweep.tables.stats import LEVEL, MIN_BLOCKS, POWER, noncentrality, widening

WIDER = 0.25
"""Independent blocks have the power of intervals at a correlation of this / sqrt(blocks): 78 to 83 % of
differences are found where 80 % are promised, with 12 to 40 blocks and 1 to 16 cells (simulated)."""
ASSUMED_LOG_RATIO_SD = 0.05
"""Standard deviation of a log ratio between blocks where nothing was measured yet: 5 %."""

MIN_DEGREES = 4
"""Degrees of freedom below which a pooled standard deviation says too little to be used."""

MORE_BLOCKS = 11
"""Number of blocks that `plan` shows for comparison; that of `measurement=careful`."""


@dataclass(frozen=True)
class Noise:
    """How much log(variant / baseline) varies between blocks.

    Attributes:
        log_ratio_sd: standard deviation.
        num_ratios: log ratios that it was estimated from; 0 where it is assumed.
    """

    log_ratio_sd: float = ASSUMED_LOG_RATIO_SD
    num_ratios: int = 0


def minimum_detectable_effect(num_blocks: int, num_comparisons: int, log_ratio_sd: float) -> float:
    """Return the smallest relative difference that is claimed with a probability of `POWER`.

    A claim needs a two-sided p-value of Student's t over blocks below 0.05 / `num_comparisons`: the
    first and strictest step of Holm's adjustment, so that the claim is made whatever the other
    cells show. The test statistic of a true log ratio d has a noncentral t distribution with
    noncentrality d sqrt(n) / sd (Cohen, Statistical Power Analysis, 1988, chapter 2). From 12 blocks on the
    interval is wider, although nothing correlates (`stats.widening`).

    Args:
        num_blocks: blocks that hold the cell and its baseline.
        num_comparisons: cells that are compared with the same baseline.
        log_ratio_sd: standard deviation of the log ratio between blocks.

    Returns:
        0.1 where a cell must be 10 % faster; infinity below three blocks, which give no interval.
    """
    if num_blocks < MIN_BLOCKS:
        return inf
    distance = noncentrality(num_blocks - 1.0, LEVEL / num_comparisons, POWER)
    error = log_ratio_sd * widening(WIDER / sqrt(num_blocks), num_blocks) / sqrt(num_blocks)
    return expm1(distance * error)


def noise_of(runs: Iterable[RunRecord], baselines: Mapping[str, str | None]) -> Noise:
    """Estimate the noise from records: the standard deviation within cells, pooled over cells.

    Args:
        runs: records of a sweep folder.
        baselines: cell id -> id of its baseline.
    """
    rows = [
        {
            "cell_id": run.cell_id,
            "sweep": run.sweep,
            "block": run.block,
            "images_per_second": run.metrics.get("images_per_second"),
            "device": run.environment.get("device"),
            "nodes_used": run.environment.get("nodes_used"),
        }
        for run in runs
        if run.status == Status.measured and not run.is_look
    ]
    if not rows:
        return Noise()
    ratios = log_ratios(log_throughput_per_block(DataFrame(rows)), baselines)
    groups = ratios.groupby("cell_id", observed=True)["log_ratio"]
    degrees = groups.count() - 1
    if (total := int(degrees.sum())) < MIN_DEGREES:
        return Noise()
    squares = (groups.var().fillna(0.0) * degrees).sum()
    return Noise(sqrt(float(squares) / total), int(groups.count().sum()))


def describe_detectable_effect(plan: SweepPlan, noise: Noise) -> str:
    """Return a sentence about what the sweep can show; empty where it compares nothing."""
    compared = [e for e in plan.runnable if e.baseline_id not in (None, e.cell_id)]
    if not compared:
        return ""
    num_blocks = min(entry.spec.measurement.blocks for entry in compared)
    family = max(Counter(entry.baseline_id for entry in compared).values())
    if num_blocks < MIN_BLOCKS:
        return (
            f"measurement.blocks={num_blocks} gives no interval, so no difference can be shown: use "
            "measurement=standard, which has 5 blocks."
        )
    more = MORE_BLOCKS if num_blocks < MORE_BLOCKS else 2 * num_blocks

    def shown(blocks: int) -> str:
        return _percent(minimum_detectable_effect(blocks, family, noise.log_ratio_sd))

    source = (
        f"seen in {noise.num_ratios} ratios of this sweep"
        if noise.num_ratios
        else "assumed: this sweep has measured too little yet"
    )
    cells = "1 cell" if family == 1 else f"{family} cells"
    return (
        f"{num_blocks} blocks detect a difference of {shown(num_blocks)} ({100 * POWER:.0f} % power, "
        f"{cells} compared); {more} blocks detect {shown(more)}. Standard deviation of a ratio "
        f"between blocks: {_percent(noise.log_ratio_sd)} ({source})."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"
