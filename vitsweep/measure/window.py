"""From the step times of all ranks to the step time of the run: where the timed window begins, and
how long it lasts on the slowest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

UNEVEN = 1.1
"""Steps are uneven where their mean is more than this many times their median."""
EXPLAINED = 0.5
"""Data is the cause where steps waited for it at least this share of the time beyond the median."""

DRIFT_SHARE = 0.05
"""A trend that moves the step time by more than this share within a run counts as drift."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The timed window of a run.

    Attributes:
        warmup_steps: steps before the window.
        steps: steps in it, without those whose update the loss scaler skipped.
        metrics: step time columns of the record; {} without a step.
        drifting: whether step times show a trend.
        uneven: whether a few slow steps make the mean much larger than the median; None without a step.
        uneven_cause: `data` where waiting for data explains them, else `unknown`; None for even steps.
    """

    warmup_steps: int
    steps: int
    metrics: dict[str, float | None] = field(default_factory=dict)
    drifting: bool = False
    uneven: bool | None = None
    uneven_cause: str | None = None


def summarize_window(
    times_ms: Sequence[Sequence[float]],
    skipped: Sequence[bool],
    warmup_steps: int,
    data_waits_ms: Sequence[Sequence[float]],
) -> Window:
    """Return the step time of a run: elapsed time of the window on the slowest rank, per step.

    A median over steps would hide a loader that stalls now and then. A maximum over ranks of every
    single step would add up jitter that the ranks catch up with in the next step.

    Steps whose update was skipped count neither as images nor as time.

    Args:
        times_ms: by rank and step, warm-up included.
        skipped: by step, whether the loss scaler skipped the update; the same on all ranks.
        warmup_steps: steps to leave out; more are left out where the samples show a longer warm-up.
        data_waits_ms: by rank and step, time in which the host waited for data.
    """
    times, waits = np.asarray(times_ms, float), np.asarray(data_waits_ms, float)
    cut = warm_up_steps(times.mean(axis=0).tolist(), warmup_steps)
    counted = np.arange(times.shape[1]) >= cut
    counted &= ~np.asarray(skipped, bool)
    times, waits = times[:, counted], waits[:, counted]
    steps = times.shape[1]
    if not steps:
        return Window(warmup_steps=cut, steps=0)
    elapsed = times.sum(axis=1)
    slowest = times[elapsed.argmax()]
    mean, median = float(slowest.mean()), float(np.median(slowest))
    uneven = mean > UNEVEN * median
    return Window(
        warmup_steps=cut,
        steps=steps,
        metrics={
            "step_time_ms": mean,
            "step_time_median_ms": median,
            "step_time_p95_ms": float(np.quantile(slowest, 0.95)),
            "step_time_mean_over_median": mean / median,
            "rank_skew_ms": float(elapsed.max() - elapsed.min()) / steps,
            "data_wait_ms": float(waits.mean(axis=1).max()),
            "window_seconds": float(elapsed.max()) / 1e3,
        },
        drifting=is_drifting(slowest.tolist()),
        uneven=uneven,
        uneven_cause=_cause(slowest, waits.max(axis=0)) if uneven else None,
    )


def _cause(times: NDArray[np.float64], waits: NDArray[np.float64]) -> str:
    """Say whether waiting for data explains the time that slow steps took beyond the median."""
    slow, waited = (np.maximum(0, x - np.median(x)).sum() for x in (times, waits))
    return "data" if waited >= EXPLAINED * slow else "unknown"


def warm_up_steps(times_ms: list[float], at_least: int) -> int:
    """Return how many steps at the start to leave out.

    MSER (White, Simulation 69(6), 1997): the cut that minimises the squared standard error of the
    mean of what remains, searched from `at_least` to half of the samples. It is taken only if what
    it cuts off is slow as a whole: its median above the 90th percentile of what remains. A stall in
    the midst of ordinary steps is no warm-up; without this rule half of all stalls would be lost.

    Args:
        times_ms: all step times of a run.
        at_least: steps that are left out in any case.
    """
    last = max(at_least, len(times_ms) // 2)
    cuts = range(at_least, min(last, len(times_ms) - 2) + 1)
    if not cuts:
        return min(at_least, max(0, len(times_ms) - 1))
    best = min(cuts, key=lambda cut: float(np.var(times_ms[cut:])) / (len(times_ms) - cut))
    cut_off, kept = times_ms[at_least:best], times_ms[best:]
    return best if cut_off and np.median(cut_off) > np.quantile(kept, 0.9) else at_least


def is_drifting(times_ms: list[float]) -> bool:
    """Whether the steady steps show a trend: Theil-Sen slope whose 95 % interval excludes zero.

    Args:
        times_ms: step times after warm-up; fewer than 8 show nothing.
    """
    if len(times_ms) < 8:
        return False
    slope, _, low, high = stats.theilslopes(times_ms)
    moved = abs(slope) * len(times_ms) / float(np.median(times_ms))
    return bool(low * high > 0 and moved > DRIFT_SHARE)
