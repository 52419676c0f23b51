"""Comparisons of cells that never shared a block, by way of the baseline each one shared with."""

from collections.abc import Mapping
from math import exp, nan, sqrt

from pandas import DataFrame, Series
from scipy.special import stdtr, stdtrit

from vitsweep.tables.speedup import LEVEL, MIN_BLOCKS


def contrast(weights: Mapping[str, float], ratios: DataFrame) -> dict[str, float]:
    """Return exp(sum of weight x mean log ratio) over cells, as a row like those of `estimate`.

    The log ratios of a cell are over its baseline in its own blocks, so what differs between blocks
    has cancelled before; the cells are then independent samples, and the interval is Welch's
    (Satterthwaite's degrees of freedom). A gain is `{new: 1, old: -1}`. A baseline itself has no
    ratios: its log is 0 without error.

    Args:
        weights: cell -> weight.
        ratios: rows `cell_id, log_ratio`, as `log_ratios` returns them.
    """
    groups = {cell: ratios.loc[ratios["cell_id"] == cell, "log_ratio"] for cell in weights}
    used = {cell: values for cell, values in groups.items() if len(values)}
    middle = sum(weights[cell] * float(values.mean()) for cell, values in used.items())
    num_blocks = min((len(values) for values in used.values()), default=0)
    row = {"num_blocks": float(num_blocks), "speedup": exp(middle) if used else nan}
    if num_blocks < MIN_BLOCKS:
        return row | {"speedup_low": nan, "speedup_high": nan, "p_value": nan}
    error, degrees = _error(weights, used)
    half = float(stdtrit(degrees, 1 - LEVEL / 2)) * error
    p_value = 2 * float(stdtr(degrees, -abs(middle) / error)) if error else float(middle == 0)
    ends = {"speedup_low": exp(middle - half), "speedup_high": exp(middle + half)}
    return row | ends | {"p_value": p_value}


def _error(
    weights: Mapping[str, float], groups: Mapping[str, "Series[float]"]
) -> tuple[float, float]:
    """Return standard error and degrees of freedom of the weighted sum."""
    parts = {cell: weights[cell] ** 2 * float(v.var()) / len(v) for cell, v in groups.items()}
    total = sum(parts.values())
    spread = sum(part**2 / (len(groups[cell]) - 1) for cell, part in parts.items())
    return sqrt(total), total**2 / spread if spread else 1.0
