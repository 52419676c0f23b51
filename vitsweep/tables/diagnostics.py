"""Are the blocks of a sweep independent, as its intervals assume."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.tables.blocks import BLOCK, ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import count
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import BLOCKS_FOR_CORRELATION, MIN_BLOCKS, correlation_interval
from vitsweep.tables.valid_runs import checked_runs, keyed

COLUMNS = ("diagnostic", "estimate", "low", "high", "num_runs", "threatens", "sentence")

Floats = NDArray[np.float64]


def diagnostics(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return the lag-1 correlation of blocks with its 95 % interval.

    It is the correlation of a cell's log ratio with that of the block before, over all cells, corrected for
    its bias of -1 / blocks (Marriott and Pope 1954). Blocks that are alike contain less information than
    Student's t assumes; from 12 blocks on intervals allow for it (`stats.widening`), fewer are assumed to be
    independent.

    Args:
        runs: one row per run, with `started_at`.
        baselines: cell -> its baseline cell, or None.

    Returns:
        One row `diagnostic, estimate, low, high, num_runs, threatens, sentence`; none where it cannot be
        estimated. `threatens`: the interval excludes 0 in 12 blocks or more; `sentence` then says so.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    known = keyed(checked_runs(runs, "device"), baselines)
    groups = _ratios_in_time(known.valid, known.baselines)
    groups = [g for g in groups if g.shape[1] > MIN_BLOCKS and (g != 0).any()]
    if not groups:
        return DataFrame(columns=list(COLUMNS))
    pairs = sum(g.shape[0] * (g.shape[1] - 1) for g in groups)
    estimate, low, high = correlation_interval(groups)
    threatens = low > 0 and max(g.shape[1] for g in groups) >= BLOCKS_FOR_CORRELATION
    told = f"{estimate:.2f} [{low:.2f}, {high:.2f}] over {count(pairs, 'pair')}"
    sentence = say("autocorrelation", value=told) if threatens else ""
    row = ("lag-1 correlation of blocks", estimate, low, high, pairs, threatens, sentence)
    return DataFrame([row], columns=list(COLUMNS))


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
