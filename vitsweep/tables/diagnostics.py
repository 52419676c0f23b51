"""Do the blocks of a sweep support its intervals: position effect and autocorrelation of blocks."""

from collections.abc import Mapping
from math import exp, sqrt, tanh

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.blocks import BLOCK, log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import count
from vitsweep.tables.speedup import ROW
from vitsweep.tables.stats import MIN_BLOCKS, half_width
from vitsweep.tables.valid_runs import checked_runs, counted, keyed

COLUMNS = ("diagnostic", "estimate", "low", "high", "num_runs", "threatens", "sentence")
SMALL_EFFECT = 0.005
"""A position effect below this fraction changes no interval that matters."""
CORRELATED = 0.3
"""Autocorrelation from which on the 95 % interval of 5 to 20 blocks covers less than 90 %."""
_SWEEPS = 60  # of alternating projections; a few suffice for complete blocks

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


def diagnostics(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return estimates of what would make the intervals of speedups wrong, with 95 % intervals.

    - `first run of a block`: throughput of the first run of a block relative to the others, from a
      linear model of log(images/s) with an effect of every cell and every block. A machine that is
      cold, or turbo clocks that end, make it differ from 1.
    - `autocorrelation of blocks`: correlation of a cell's log ratio with that of the block before,
      over all cells, corrected for its bias of -1 / blocks (Marriott and Pope 1954). Blocks that
      are alike contain less information than Student's t assumes.
    - `blocks on several devices`: number of blocks that hold runs of several kinds of device, as where
      Slurm requeued a job onto other nodes. Such runs form no pairs. Only where there are any.

    Args:
        runs: one row per run, with `position` (from 0) in its block and `started_at`.
        baselines: cell -> its baseline cell, or None.

    Returns:
        One row per diagnostic that can be estimated: `diagnostic, estimate, low, high, num_runs,
        threatens, sentence`. `threatens` says that the interval excludes the harmless value and the
        estimate is large enough to matter; `sentence` then says what follows.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    checked = checked_runs(runs, "device", "position")
    known = keyed(checked, baselines)
    good = counted(known.runs, ROW)
    rows = [_first_run(good), _autocorrelation(good, known.baselines), _mixed_devices(checked)]
    return DataFrame([r for r in rows if r is not None], columns=list(COLUMNS))


def _first_run(runs: DataFrame) -> dict[str, object] | None:
    throughput = runs["images_per_second"].to_numpy(float, na_value=np.nan)
    usable = runs[np.isfinite(throughput) & (throughput > 0) & runs["position"].notna()]
    cell, block = (
        usable.groupby(keys, observed=True, dropna=False).ngroup().to_numpy()
        for keys in ([ROW], BLOCK)
    )
    if len(usable) == 0:
        return None
    several = np.bincount(block)[block] > 1
    cell, block = _codes(cell[several]), _codes(block[several])
    first = (usable["position"].to_numpy(float)[several] == 0).astype(float)
    logs = np.log(usable["images_per_second"].to_numpy(float)[several])
    degrees = len(logs) - (cell.max(initial=-1) + 1) - (block.max(initial=-1) + 1)
    if degrees < MIN_BLOCKS - 1:
        return None
    x, y = _within(first, cell, block), _within(logs, cell, block)
    if x @ x < 1e-9:
        return None
    effect = float(x @ y / (x @ x))
    error = sqrt(float(((y - effect * x) ** 2).sum()) / degrees / float(x @ x))
    half = float(half_width(error, degrees))
    threatens = abs(effect) > max(half, SMALL_EFFECT)
    ratio, low, high = exp(effect), exp(effect - half), exp(effect + half)
    sentence = (
        f"The first run of a block has {ratio:.3f} [{low:.3f}, {high:.3f}] times the throughput of "
        "the others: cells that ran first more often than their baseline look "
        f"{'slower' if ratio < 1 else 'faster'} than they are. A longer warm-up helps, and so do as "
        "many blocks as cells, in which every cell is first once."
    )
    return _row("first run of a block", ratio, low, high, len(logs), threatens, sentence)


def _autocorrelation(
    runs: DataFrame, baselines: Mapping[int, int | None]
) -> dict[str, object] | None:
    ratios = log_ratios(log_throughput_per_block(runs, ROW), baselines, ROW)
    if ratios.empty:
        return None
    started = runs["started_at"] if "started_at" in runs else runs.index.to_series()
    begun = runs.assign(_begun=started.astype(str)).groupby(BLOCK, observed=True, dropna=False)
    order = begun["_begun"].min().rename("_begun").reset_index()
    order["device"] = order["device"].astype(object).where(order["device"].notna(), "")
    table = ratios.merge(order, on=BLOCK).sort_values("_begun", kind="stable")
    groups = table.groupby(ROW, sort=False)["log_ratio"]
    table = table.assign(_off=table["log_ratio"] - groups.transform("mean"))
    table = table[groups.transform("count") > MIN_BLOCKS]
    if table.empty or not (table["_off"] ** 2).sum() > 0:
        return None
    before = table.groupby(ROW, sort=False)["_off"].shift()
    pairs = int(before.notna().sum())
    blocks = len(table) / table[ROW].nunique()
    raw = float((table["_off"] * before).sum() / (table["_off"] ** 2).sum())
    estimate = float(np.clip((raw * blocks + 1) / (blocks - 3), -0.99, 0.99)) if blocks > 4 else raw
    # cells of one baseline share its noise, so their pairs count for about half
    independent = max(pairs / (1 if table[ROW].nunique() == 1 else 2), 4.0)
    half = 1.96 / sqrt(independent - 1)
    low, high = tanh(np.arctanh(estimate) - half), tanh(np.arctanh(estimate) + half)
    threatens = low > 0 and estimate >= CORRELATED / 2
    sentence = (
        f"Neighbouring blocks resemble each other (autocorrelation {estimate:.2f} "
        f"[{low:.2f}, {high:.2f}] over {count(pairs, 'pair')}): the intervals cover the truth less "
        "often than 95 %, about 87 % at 0.3. More time between blocks, or blocks on several "
        "days, help."
    )
    return _row("autocorrelation of blocks", estimate, low, high, pairs, threatens, sentence)


def _mixed_devices(runs: DataFrame) -> dict[str, object] | None:
    measured = runs[(runs["status"] == Status.measured) & runs["device"].fillna("").ne("")]
    devices = measured.groupby(["sweep", "block"], observed=True, dropna=False)["device"].unique()
    mixed = devices[devices.str.len() > 1]
    if mixed.empty:
        return None
    (_, block), found = mixed.index[0], ", ".join(map(str, mixed.iloc[0]))
    sentence = (
        f"In {count(len(mixed), 'block')} cells ran on different devices, such as {block} ({found}). Runs on "
        "different devices are refused as pairs, so that cells have fewer blocks than they ran. Keep "
        "the sweep on one kind of device (on Slurm `hydra.launcher.constraint` or `gpu_type`), and run it "
        "again: what is missing is measured."
    )
    number = float(len(mixed))
    return _row("blocks on several devices", number, number, number, len(measured), True, sentence)


def _row(
    name: str, estimate: float, low: float, high: float, runs: int, threatens: bool, sentence: str
) -> dict[str, object]:
    values = (name, estimate, low, high, runs, threatens, sentence if threatens else "")
    return dict(zip(COLUMNS, values, strict=True))


def _codes(values: Codes) -> Codes:
    return np.unique(values, return_inverse=True)[1]


def _within(values: Floats, cell: Codes, block: Codes) -> Floats:
    """Return what is left of values (runs,) without an effect of every cell and every block.

    Alternating projections: subtract the means of cells and of blocks in turns until both vanish.
    """
    left = values.copy()
    counts = [np.bincount(codes) for codes in (cell, block)]
    for _ in range(_SWEEPS):
        for codes, number in zip((cell, block), counts, strict=True):
            left -= (np.bincount(codes, weights=left) / number)[codes]
    return left
