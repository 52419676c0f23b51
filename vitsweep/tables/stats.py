"""Estimates, intervals, tests and claims over blocks; the one module that knows scipy.

At once it loads `scipy.special` alone: `scipy.stats` takes a second, `scipy.optimize` half of one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, expm1, inf, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series
from scipy import special

from vitsweep.spec.measurement import MIN_BLOCKS as MIN_BLOCKS  # for the tables that claim

Floats = NDArray[np.float64]

t_below = special.stdtr
"""P(T < t) of (degrees, t)."""

POWER = 0.8
"""Probability with which a difference that is called detectable is found."""

LEVEL = 0.05
"""A claim needs a Holm-adjusted p-value below it; the interval is the 95 % one."""


def assigned(costs: Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows and columns of the assignment with the least sum of costs, (N, M)."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(costs)
    return rows, columns


class Claim(StrEnum):
    """The claim on a difference; see `speedup.speedup_over`."""

    faster = "faster"
    slower = "slower"
    no_difference_shown = "no difference shown"
    equal = "equal"
    too_few_blocks = "too few blocks"
    screened = "screened"
    emulated = "emulated"
    missing_blocks = "missing blocks"
    baseline = "baseline"
    nothing = ""


SHOWN = (Claim.faster, Claim.slower)
"""Claims of a difference that hold among all cells of a question."""
SURE = (*SHOWN, Claim.equal, Claim.baseline)
"""Claims of rows that need no word of doubt."""


def chosen(rules: Mapping[Any, Any], default: str, index: Any) -> Series:
    """Return for each row the first word of `rules` whose condition holds."""
    conditions = [np.asarray(rule, bool) for rule in rules.values()]
    words = [str(word) for word in rules]
    return Series(np.select(conditions, words, default=str(default)), index, dtype=object)


def claims(table: DataFrame) -> Series:
    """Return the claim of each row of a table with `speedup, p_value, p_holm, num_blocks` and cells."""
    up = table["speedup"] > 1
    sure = table["p_holm"] < LEVEL
    rules = {
        Claim.baseline: table["cell_id"] == table["baseline_cell_id"],
        Claim.nothing: table["speedup"].isna(),
        Claim.emulated: table.get("_emulated", False),
        Claim.screened: table.get("_short", "") == Claim.screened,
        Claim.too_few_blocks: table["num_blocks"] < MIN_BLOCKS,
        Claim.missing_blocks: sure & table.get("_survivors", False),
        Claim.equal: (table["speedup_low"] == 1) & (table["speedup_high"] == 1),
        Claim.faster: sure & up,
        Claim.slower: sure,
    }
    return chosen(rules, Claim.no_difference_shown, table.index)


def half_width(error: Any, degrees: Any, level: Any = LEVEL) -> Any:
    """Return half of the two-sided interval of Student's t (Gosset 1908) with this error probability.

    Args:
        error: standard error, one or many.
        degrees: of freedom.
        level: probability that the interval misses the truth.
    """
    return error * special.stdtrit(degrees, 1 - level / 2)


def noncentrality(degrees: float, level: float, power: float) -> float:
    """Return the true mean over its standard error that is claimed at a level with probability `power`.

    The other tail of the two-sided test holds less than 1e-6 where the power is above 0.5.
    """
    from scipy.optimize import brentq

    threshold = float(half_width(1.0, degrees, level))

    def excess(distance: float) -> float:
        return (1 - float(special.nctdtr(degrees, distance, threshold))) - power

    return float(brentq(excess, 0.0, 3 * threshold + 10))


def two_sided(middle: Any, error: Any, degrees: Any) -> Any:
    """Return the p-value of a mean of 0; without any spread it is 0, or 1 where the mean is 0."""
    middle, error = np.asarray(middle, float), np.asarray(error, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.where(error > 0, np.abs(middle / error), np.where(middle == 0, 0.0, np.inf))
    return 2 * t_below(degrees, -statistic)


def mean_interval(values: Floats) -> tuple[float, float, float]:
    """Return mean and 95 % interval over blocks, oldest first; no interval below `MIN_BLOCKS`."""
    middle = float(values.mean()) if len(values) else nan
    if len(values) < MIN_BLOCKS:
        return middle, nan, nan
    half = float(half_width(spread(values) / sqrt(len(values)), len(values) - 1.0))
    return middle, middle - half, middle + half


PRIOR = 0.1
"""Precision g of the prior N(0, 1/g) on mean / standard deviation; near the best from 3 to 120 values."""


def any_look_half_width(spread: Any, number: Any, level: Any = LEVEL) -> Any:
    """Return half of an interval that covers the mean at all numbers of values at once.

    Wherever somebody looks at the values as they come and stops when he likes, the interval misses the
    truth with probability `level` at most; Student's t, looked at after each of 3 to 60 values, misses
    in 28 %. It is 3.07, 1.95 and 1.82 times as wide as Student's at 3, 5 and 20 values. With s the root of
    the mean squared deviation, n the number of values and R = ((n + g) / (g level^2))^(1/n), the half width
    is s sqrt((n + g)(R - 1) / (n + g - g R)); it is infinite where g R >= n + g, such as below 3 values
    (t-mixture of Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means
    with unknown variance", arXiv:2310.03722, theorem 4.9). The values must be independent.

    Args:
        spread: standard deviation of the values with n - 1 in the denominator, one or many.
        number: of values.
        level: probability that the interval ever misses the truth.
    """
    number = np.asarray(number, float)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        total = number + PRIOR
        ratio = (total / (PRIOR * np.asarray(level, float) ** 2)) ** (1 / number)
        rest = total - PRIOR * ratio
        factor = np.sqrt(np.where(rest > 0, total * (ratio - 1) / rest, np.inf))
        return spread * np.sqrt((number - 1) / number) * factor


def least_blocks(comparisons: int) -> int:
    """Return the number of blocks below which no any-look interval is finite among so many cells."""
    numbers = np.arange(MIN_BLOCKS, 100)
    return int(numbers[np.isfinite(any_look_half_width(1.0, numbers, LEVEL / comparisons))][0])


def any_look_p_value(middle: Any, spread: Any, number: Any) -> Any:
    """Return the p-value of a mean of 0 that belongs to `any_look_half_width`: 1 / B, at most 1.

    log B = log(g / (n + g)) / 2 - n/2 log(1 - S^2 / ((n + g) V)), with S the sum of the values and V
    that of their squares. It is valid wherever one stops, so Holm's procedure may follow.
    """
    return np.exp(-np.maximum(log_evidence(middle, spread, number), 0.0))


def log_evidence(middle: Any, spread: Any, number: Any) -> Any:
    """Return log B of `any_look_p_value`."""
    middle, number = np.asarray(middle, float), np.asarray(number, float)
    total = number + PRIOR
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = middle**2 + np.asarray(spread, float) ** 2 * (number - 1) / number
        share = np.where(squares > 0, number * middle**2 / (total * squares), 0.0)
    return np.log(PRIOR / total) / 2 - number / 2 * np.log1p(-share)


BLOCKS_FOR_CORRELATION = 12
"""From so many values on their own correlation widens an interval; fewer cannot know it."""
HALF_AN_ERROR = 0.5
"""So many standard errors above the estimate the correlation is assumed. In simulations of a correlation
of 0.3 intervals so cover 94 to 95 %; independent blocks pay with 12 % (40 blocks) to 28 % (12) of width in
the mean, half as much in the median."""


def mean_variance_factor(correlation: float, number: int) -> float:
    """Return the variance of the mean of AR(1) values over that of independent ones.

    It is 1 + 2 sum (1 - k/n) correlation^k over the lags k from 1 to n - 1.
    """
    lags = np.arange(1, number)
    return 1 + 2 * float(((1 - lags / number) * correlation**lags).sum())


def correlation_in_time(groups: Sequence[Floats]) -> float:
    """Return the lag-1 autocorrelation over all cells, corrected for its bias (Marriott and Pope 1954).

    Args:
        groups: arrays cells x blocks without each cell's mean, oldest block first.
    """
    squares = sum(float((g**2).sum()) for g in groups)
    if not squares:
        return 0.0
    products = sum(float((g[:, 1:] * g[:, :-1]).sum()) for g in groups)
    blocks = sum(g.size for g in groups) / sum(g.shape[0] for g in groups)
    return float(np.clip((products / squares * blocks + 1) / (blocks - 3), -0.99, 0.99))


def correlation_interval(groups: Sequence[Floats]) -> tuple[float, float, float]:
    """Return `correlation_in_time` and its 95 % interval by Fisher's transformation.

    Cells of one set of blocks share the noise of their baseline, and count as one series.

    Args:
        groups: see `correlation_in_time`.
    """
    found = correlation_in_time(groups)
    half = 1.96 / sqrt(max(sum(group.shape[1] for group in groups) - 3, 1))
    low, high = (float(np.tanh(np.arctanh(found) + side * half)) for side in (-1, 1))
    return found, low, high


def widening(correlation: float, number: int) -> float:
    """Return by what the standard error of a mean of blocks is larger than that of independent blocks.

    The number of blocks counts as n / `mean_variance_factor`, at a correlation `HALF_AN_ERROR` above the one
    given. 1 below 12 blocks.
    """
    if number < BLOCKS_FOR_CORRELATION:
        return 1.0
    upper = np.tanh(np.arctanh(correlation) + HALF_AN_ERROR / sqrt(number - 3))
    return sqrt(max(1.0, mean_variance_factor(float(upper), number)))


WIDER = 0.25
"""Independent blocks have the power of intervals at a correlation of this / sqrt(blocks): 78 to 83 % of
differences are found where 80 % are promised, with 12 to 40 blocks and 1 to 16 cells (simulated)."""


def minimum_detectable_effect(num_blocks: int, num_comparisons: int, log_ratio_sd: float) -> float:
    """Return the smallest relative difference that is claimed with a probability of `POWER`.

    A claim needs a two-sided p-value of Student's t over blocks below 0.05 / `num_comparisons`: the
    first and strictest step of Holm's adjustment, so that the claim is made whatever the other
    cells show. The test statistic of a true log ratio d has a noncentral t distribution with
    noncentrality d sqrt(n) / sd (Cohen, Statistical Power Analysis, 1988, chapter 2). From 12 blocks on the
    interval is wider, although nothing correlates (`widening`).

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


def spread_factor(values: Floats) -> float:
    """Return the `widening` of values, one per block, oldest first."""
    if len(values) < BLOCKS_FOR_CORRELATION:
        return 1.0
    return widening(correlation_in_time([values[None] - values.mean()]), len(values))


def spread(values: Floats) -> float:
    """Return the standard deviation of values, oldest first, times `spread_factor`."""
    return float(values.std(ddof=1)) * spread_factor(values)


def moments(groups: Any) -> DataFrame:
    """Return `mean, variance, count` of grouped values, oldest first; the variance is `spread` squared."""
    table = DataFrame({"mean": groups.mean(), "variance": groups.var(), "count": groups.count()})
    many = table.index[table["count"] >= BLOCKS_FOR_CORRELATION]
    factors = [spread_factor(groups.get_group(key).to_numpy(float)) for key in many]
    table.loc[many, "variance"] *= np.square(factors)
    return table


ROUNDING = 1e-9
"""Means and spreads of logs below it are the rounding of float64: the values are equal."""


def estimate(ratios: DataFrame, key: str = "cell_id") -> DataFrame:
    """Return `<key>, num_blocks, speedup, speedup_low, speedup_high, block_noise, p_value` from log ratios.

    `block_noise` is the standard deviation of the log ratio of one block.
    From 12 blocks on the standard error grows where neighbours are correlated (`spread_factor`).
    The interval is Student's t; of a key with any block of a command that looked at its intervals before
    it decided what to measure, it is `any_look_half_width`. Both are empty below `MIN_BLOCKS` blocks.

    Args:
        ratios: rows `<key>, log_ratio`, oldest first, and `any_look` where a block may be of such a command.
        key: column that identifies what is estimated.
    """
    groups = ratios.groupby(key, sort=False, observed=True)["log_ratio"]
    found = moments(groups)
    mean, sd, num_blocks = found["mean"], np.sqrt(found["variance"]), found["count"]
    mean, sd = (v.mask(v.abs() < ROUNDING, 0.0) for v in (mean, sd))
    error: Series = sd / np.sqrt(num_blocks)
    enough = num_blocks >= MIN_BLOCKS
    any_look = Series(mean.index.isin(any_look_keys(ratios, key)), mean.index)
    half = half_width(error, num_blocks - 1.0)
    p_value = Series(two_sided(mean, error, num_blocks - 1.0), mean.index)
    if any_look.any():
        half = half.mask(any_look, any_look_half_width(sd, num_blocks))
        p_value = p_value.mask(any_look, any_look_p_value(mean, sd, num_blocks))
    return DataFrame(
        {
            "num_blocks": num_blocks,
            "speedup": np.exp(mean),
            "speedup_low": np.exp(mean - half.where(enough)),
            "speedup_high": np.exp(mean + half.where(enough)),
            "block_noise": groups.std(),
            "p_value": p_value.where(enough),
        }
    ).reset_index()


def any_look_keys(ratios: DataFrame, key: str = "cell_id") -> set[Any]:
    """Return the keys with a block of a command that tested its intervals while it measured."""
    looked = ratios["any_look"].eq(True) if "any_look" in ratios else np.zeros(len(ratios), bool)
    return set(ratios.loc[looked, key])


def holm(p_values: Series) -> Series:
    """Return Holm's step-down adjusted p-values; missing ones stay missing and do not count."""
    return Series(adjusted(p_values.to_numpy(float, na_value=np.nan))[0], p_values.index)


def adjusted(p_values: Floats) -> tuple[Floats, Floats]:
    """Return `holm` of an array of p-values, and the level at which each is tested; NaN for NaN.

    The interval with this error is the one that belongs to the claim: it excludes 1 exactly where
    the adjusted p-value is below `LEVEL`. With m p-values, the i-th smallest is tested at LEVEL / (m - i + 1)
    until one is not rejected; that one and all larger ones at the same level.
    """
    order = np.argsort(p_values, kind="stable")  # NaN last
    known = p_values[order[: np.count_nonzero(~np.isnan(p_values))]]
    left = np.arange(len(known), 0, -1)
    found = np.full((2, len(p_values)), np.nan)
    found[0, : len(known)] = np.minimum(np.maximum.accumulate(known * left), 1.0)
    accepted = np.flatnonzero(known * left >= LEVEL)
    if len(accepted):
        left[accepted[0] :] = left[accepted[0]]
    found[1, : len(known)] = LEVEL / left
    unsorted = np.empty_like(found)
    unsorted[:, order] = found
    return unsorted[0], unsorted[1]


def interval(table: DataFrame, level: "Series | float", blocks: str = "num_blocks") -> DataFrame:
    """Return `low, high`: the interval of each row at another error level than `LEVEL`.

    Args:
        table: `speedup, speedup_low, speedup_high` at `LEVEL`, and the number of blocks; `any_look`
            where an interval may be `any_look_half_width`.
        level: probability that the interval misses the truth, per row.
        blocks: column with the number of blocks.
    """
    degrees = table[blocks].astype(float) - 1.0
    middle = np.log(table["speedup"].astype(float))
    half = np.log(table["speedup_high"].astype(float)) - middle
    with np.errstate(invalid="ignore"):
        wider = half_width(half, degrees, level) / special.stdtrit(degrees, 1 - LEVEL / 2)
        any_look = table.get("any_look", Series(False, table.index)).eq(True).fillna(False)
        if any_look.any():
            number = degrees + 1
            factor = any_look_half_width(1.0, number, level) / any_look_half_width(1.0, number)
            wider = wider.mask(any_look.astype(bool), half * factor)
        half = wider.where(np.isfinite(wider))
    return DataFrame({"low": np.exp(middle - half), "high": np.exp(middle + half)})


@dataclass(frozen=True)
class Sample:
    """Mean, variance and number of a cell's log ratios."""

    mean: float
    variance: float
    num_blocks: int


def samples(ratios: DataFrame, by: str = "cell_id") -> dict[Any, Sample]:
    """Return the sample of every cell: rows `<by>, log_ratio`, grouped once for many contrasts."""
    found = moments(ratios.groupby(by, sort=False, observed=True)["log_ratio"])
    columns = (found[c] for c in ("mean", "variance", "count"))
    return {
        cell: Sample(float(mean), float(variance), int(count))
        for cell, mean, variance, count in zip(found.index, *columns, strict=True)
    }


def contrast(
    weights: Mapping[Any, float],
    known: Mapping[Any, Sample],
    baseline: Any = None,
) -> dict[str, float]:
    """Return exp(sum of weight x mean log ratio) over cells, as a row like those of `estimate`.

    The log ratios of a cell are over its baseline in its own blocks, so differences between blocks
    have cancelled; the cells are then independent samples, and the interval is Welch's
    (Satterthwaite's degrees of freedom). A gain is `{new: 1, old: -1}`.

    Args:
        weights: cell -> weight.
        known: `samples` of the log ratios, as `log_ratios` returns them.
        baseline: the cell whose log ratio is 0 without error by definition. Another cell without
            a ratio (it shared no block with its baseline) makes the whole row missing.
    """
    used = {cell: known[cell] for cell in weights if cell in known}
    unknown = [cell for cell in weights if cell not in known and cell != baseline]
    if unknown or not used:
        return dict.fromkeys(("speedup", "speedup_low", "speedup_high", "p_value"), nan) | {
            "num_blocks": 0.0
        }
    middle = sum(weights[cell] * sample.mean for cell, sample in used.items())
    num_blocks = min(sample.num_blocks for sample in used.values())
    row = {"num_blocks": float(num_blocks), "speedup": exp(middle)}
    if num_blocks < MIN_BLOCKS:
        return row | {"speedup_low": nan, "speedup_high": nan, "p_value": nan}
    error, degrees = _error(weights, used)
    half = float(half_width(error, degrees))
    p_value = float(two_sided(middle, error, degrees))
    ends = {"speedup_low": exp(middle - half), "speedup_high": exp(middle + half)}
    return row | ends | {"p_value": p_value}


def _error(weights: Mapping[Any, float], used: Mapping[Any, Sample]) -> tuple[float, float]:
    """Return standard error and degrees of freedom of the weighted sum."""
    parts = {c: weights[c] ** 2 * s.variance / s.num_blocks for c, s in used.items()}
    total = sum(parts.values())
    spread = sum(part**2 / (used[c].num_blocks - 1) for c, part in parts.items())
    return sqrt(total), total**2 / spread if spread else 1.0
