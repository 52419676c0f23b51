"""Ratios between two measurements of the same cells, made on different days, with Welch intervals."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from pandas import DataFrame, Series
from scipy.special import stdtrit

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import COLUMN_OF, HEADINGS, METRICS
from vitsweep.tables.ratios import LEVEL, MIN_BLOCKS, log_ratios, log_throughput_per_block
from vitsweep.tables.show import peaks_gib
from vitsweep.tables.status import counted

DERIVED = ("speedup_low", "speedup_high", "throughput_spread")
"""Columns that state the uncertainty of another column."""


def metric_named(name: str) -> str:
    """Return the column of a metric that can become better or worse.

    Raises:
        VitsweepError: there is no such metric, or neither direction is an improvement.
    """
    column = COLUMN_OF.get(name, name)
    comparable = [c for c, m in METRICS.items() if m.better and c not in DERIVED]
    if column not in comparable:
        headings = [h for c, h in HEADINGS.items() if c in comparable and h != c]
        raise VitsweepError(
            f"`{name}` is not a metric that can become better or worse; choose from "
            f"{', '.join((*headings, *comparable))}."
        )
    return column


def compare_with_kept(
    now: DataFrame,
    kept: DataFrame,
    metrics: Sequence[str] = ("images_per_second",),
    baselines: Mapping[str, str | None] | None = None,
) -> DataFrame:
    """Compare the metrics of every cell with its runs in a kept baseline.

    One observation is a run; for `speedup` it is a block, whose ratio over the cell's baseline does
    not contain differences between machines of one kind. Values that are missing, not finite or not above 0
    are left out. Intervals are Welch's over logs, at 95 % for all rows together (Bonferroni).

    Args:
        now: one row per run.
        kept: one row per run of the kept baseline.
        metrics: columns of `METRICS`.
        baselines: cell -> its baseline cell, needed for `speedup`.

    Returns:
        One row per cell and metric that has values in `now` or `kept`: `cell_id, metric,
        count_kept, count_now, ratio` (now / kept), `ratio_low, ratio_high` (empty with fewer than
        3 values in either).
    """
    parts = [
        _statistics(kept, metric, baselines or {}, "kept").merge(
            _statistics(now, metric, baselines or {}, "now"), on="cell_id", how="outer"
        ).assign(metric=metric)
        for metric in metrics
    ]  # fmt: skip
    return _with_ratio(pd.concat(parts, ignore_index=True))


def _statistics(
    runs: DataFrame, metric: str, baselines: Mapping[str, str | None], side: str
) -> DataFrame:
    logs = _logs(runs, metric, baselines).groupby("cell_id", observed=True)["log"]
    table = DataFrame({"mean": logs.mean(), "variance": logs.var(), "count": logs.count()})
    return table.add_suffix(f"_{side}").rename_axis("cell_id").reset_index()


def _logs(runs: DataFrame, metric: str, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return `cell_id, log`, one row per run or block that has a value."""
    good = counted(runs)
    if metric == "speedup":
        ratios = log_ratios(log_throughput_per_block(good), baselines)
        return ratios.rename(columns={"log_ratio": "log"})[["cell_id", "log"]]
    found = (
        peaks_gib(good) if metric == "peak_gib" else good.get(metric, Series(np.nan, good.index))
    )
    values = pd.to_numeric(found, errors="coerce").astype(float)
    usable = np.isfinite(values) & (values > 0)
    return DataFrame({"cell_id": good["cell_id"], "log": np.log(values.where(usable))})[usable]


def _with_ratio(table: DataFrame) -> DataFrame:
    counts = table[["count_kept", "count_now"]].fillna(0).astype(int)
    comparable = (counts >= MIN_BLOCKS).all(axis=1)
    errors = [table[f"variance_{s}"] / table[f"count_{s}"] for s in ("kept", "now")]
    squared = errors[0] + errors[1]
    # Welch-Satterthwaite; identical runs have no variance and any number of degrees does
    parts = [e**2 / (table[f"count_{s}"] - 1) for e, s in zip(errors, ("kept", "now"), strict=True)]
    degrees = (squared**2 / (parts[0] + parts[1])).where(squared > 0, 1.0)
    quantile = stdtrit(degrees, 1 - LEVEL / 2 / max(int(comparable.sum()), 1))
    middle = table["mean_now"] - table["mean_kept"]
    half = (quantile * np.sqrt(squared)).where(comparable)
    return table.assign(
        **counts,
        ratio=np.exp(middle),
        ratio_low=np.exp(middle - half),
        ratio_high=np.exp(middle + half),
    )
