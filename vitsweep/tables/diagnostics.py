"""Do the blocks of a sweep support its intervals: position effect and lag-1 correlation of blocks."""

from collections.abc import Mapping
from math import nan, sqrt

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.blocks import BLOCK, ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.cost import numbers, peaks_gib
from vitsweep.tables.formatting import (
    Column,
    count,
    number,
    ratios,
    text_columns,
    values,
    with_interval,
)
from vitsweep.tables.names import cell_names
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import BLOCKS_FOR_CORRELATION, MIN_BLOCKS, correlation_interval
from vitsweep.tables.valid_runs import checked_runs, keyed, text

COLUMNS = ("diagnostic", "estimate", "low", "high", "num_runs", "threatens", "sentence")
NOISY = 0.1
"""Noise of a block's ratio above which a sentence says so."""

Floats = NDArray[np.float64]


def diagnostics(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return estimates of what would make the intervals of speedups wrong, with 95 % intervals.

    - `lag-1 correlation of blocks`: correlation of a cell's log ratio with that of the block before,
      over all cells, corrected for its bias of -1 / blocks (Marriott and Pope 1954). Blocks that
      are alike contain less information than Student's t assumes; from 12 blocks on intervals allow for it
      (`stats.widening`), fewer are assumed to be independent.
    - `blocks on several devices`: number of blocks that hold runs of several kinds of device, as where
      Slurm requeued a job onto other nodes. Such runs form no pairs. Only where there are any.
    - `noise of a ratio`: standard deviation of the log ratio of one block, over all cells.

    Args:
        runs: one row per run, with `position` (from 0) in its block and `started_at`.
        baselines: cell -> its baseline cell, or None.

    Returns:
        One row per diagnostic that can be estimated: `diagnostic, estimate, low, high, num_runs,
        threatens, sentence`. `threatens` says that the interval excludes the harmless value and the
        estimate is large enough to matter; `sentence` then says so. A number that is only
        counted has no interval.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    checked = checked_runs(runs, "device", "position")
    known = keyed(checked, baselines)
    good = known.valid
    rows = [
        _autocorrelation(good, known.baselines),
        _mixed_devices(checked),
        _noise(good, known.baselines),
    ]
    return DataFrame([r for r in rows if r is not None], columns=list(COLUMNS))


def _autocorrelation(
    runs: DataFrame, baselines: Mapping[int, int | None]
) -> dict[str, object] | None:
    groups = [g for g in _ratios_in_time(runs, baselines) if g.shape[1] >= MIN_BLOCKS + 1]
    groups = [g for g in groups if (g != 0).any()]
    if not groups:
        return None
    pairs = sum(g.shape[0] * (g.shape[1] - 1) for g in groups)
    estimate, low, high = correlation_interval(groups)
    threatens = low > 0 and max(g.shape[1] for g in groups) >= BLOCKS_FOR_CORRELATION
    told = f"{estimate:.2f} [{low:.2f}, {high:.2f}] over {count(pairs, 'pair')}"
    sentence = say("autocorrelation", value=told)
    interval = low, high
    return _row("lag-1 correlation of blocks", estimate, interval, pairs, threatens, sentence)


def _ratios_in_time(runs: DataFrame, baselines: Mapping[int, int | None]) -> list[Floats]:
    """Return arrays cells x blocks of log ratios without each cell's mean, oldest block first.

    One array per set of blocks that some cells share.
    """
    ratios = log_ratios(log_throughput_per_block(runs, ROW), baselines, ROW)
    if ratios.empty:
        return []
    block = ratios.groupby(BLOCK, sort=False, dropna=False).ngroup()
    own: dict[tuple[int, ...], list[Floats]] = {}
    for _, rows in ratios.assign(_block=block).groupby(ROW, sort=False):
        logs = rows["log_ratio"].to_numpy(float)
        own.setdefault(tuple(rows["_block"]), []).append(logs - logs.mean())
    return [np.stack(found) for found in own.values()]


def _mixed_devices(runs: DataFrame) -> dict[str, object] | None:
    measured = runs[(runs["status"] == Status.measured) & runs["device"].fillna("").ne("")]
    devices = measured.groupby(["sweep", "block"], observed=True, dropna=False)["device"].unique()
    mixed = devices[devices.str.len() > 1]
    if mixed.empty:
        return None
    (_, block), found = mixed.index[0], ", ".join(map(str, mixed.iloc[0]))
    blocks = count(len(mixed), "block")
    sentence = say("mixed_devices", blocks=blocks, block=block, devices=found)
    number = float(len(mixed))
    return _row("blocks on several devices", number, None, len(measured), True, sentence)


def _noise(runs: DataFrame, baselines: Mapping[int, int | None]) -> dict[str, object] | None:
    groups = _ratios_in_time(runs, baselines)
    degrees = sum(g.shape[0] * (g.shape[1] - 1) for g in groups)
    if degrees < MIN_BLOCKS - 1:
        return None
    spread = sqrt(sum(float((g**2).sum()) for g in groups) / degrees)
    sentence = say("noise", spread=100 * spread)
    pairs = sum(g.size for g in groups)
    return _row("noise of a ratio", spread, None, pairs, spread > NOISY, sentence)


def _row(
    name: str,
    estimate: float,
    interval: tuple[float, float] | None,
    num_runs: int,
    threatens: bool,
    sentence: str,
) -> dict[str, object]:
    low, high = interval or (nan, nan)
    said = sentence if threatens else ""
    values = (name, estimate, low, high, num_runs, threatens, said)
    return dict(zip(COLUMNS, values, strict=True))


# Predicted metrics beside measured ones.

PREFIX = "predicted_"


def predictions_text(cells: DataFrame) -> DataFrame:
    """Return the predictions made before the cells ran beside what was measured, as text.

    One row per measured cell that has a prediction from before its first run.
    """
    found = _with_step_times(cells.assign(name=cell_names(cells), peak=peaks_gib(cells)))
    measured = numbers(found, "step_time_ms")
    factors = {
        f"factor{end}": numbers(found, f"{PREFIX}step_time{end}_ms") / measured
        for end in ("", "_low", "_high")
    }
    peak = numbers(found, f"{PREFIX}peak_gib") / found["peak"]
    return text_columns(found.assign(**factors, peak_factor=peak), _SHOWN)


_SHOWN: dict[str, Column] = {
    "cell": values("name"),
    "step ms": values("step_time_ms", number),
    "predicted": with_interval(
        "predicted_step_time_ms", number, number, "predicted_step_time_{}_ms"
    ),
    "predicted / measured": ratios("factor"),
    "peak GiB": values("peak", number),
    "predicted peak": values("predicted_peak_gib", number),
    "peak predicted / measured": ratios("peak_factor"),
}


def prediction_sentence(cells: DataFrame) -> str:
    """Return how far predicted step times were off, and how often their intervals held; or ""."""
    found = _with_step_times(cells)
    if found.empty:
        return ""
    measured = found["step_time_ms"].astype(float)
    ratio = found["predicted_step_time_ms"].astype(float) / measured
    off = ratio.where(ratio > 1, 1 / ratio)
    ends = ["predicted_step_time_low_ms", "predicted_step_time_high_ms"]
    low, high = (numbers(found, end) for end in ends)
    held = int(((measured >= low) & (measured <= high)).sum())
    factors = {"median": off.median(), "high": off.quantile(0.9)}
    return say(
        "predictions", cells=count(len(found), "cell"), held=held, all=low.count(), **factors
    )


def _with_step_times(cells: DataFrame) -> DataFrame:
    columns = ["predicted_step_time_ms", "step_time_ms"]
    if not {*columns, "predicted_at", "started_at"} <= set(cells):
        return cells.iloc[:0]
    numbers = cells[columns].apply(pd.to_numeric, errors="coerce")
    first = text(cells, "predicted_at").between("1", text(cells, "started_at"))
    return cells[(cells["status"] == Status.measured) & (numbers > 0).all(axis=1) & first]
