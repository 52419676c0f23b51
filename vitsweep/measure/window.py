"""From the step times of all ranks to the step time of the run: how long its window lasts."""

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

    Every step of the window counts, a slow first one too: a rule that cuts slow steps from the
    samples would also cut the stalls of a loader. What still falls is flagged as `drifting`.
    Steps whose update was skipped count neither as images nor as time.

    Args:
        times_ms: by rank and step, warm-up included.
        skipped: by step, whether the loss scaler skipped the update; the same on all ranks.
        warmup_steps: steps before the window.
        data_waits_ms: by rank and step, time in which the host waited for data.
    """
    times, waits = np.asarray(times_ms, float), np.asarray(data_waits_ms, float)
    counted = np.arange(times.shape[1]) >= warmup_steps
    counted &= ~np.asarray(skipped, bool)
    times, waits = times[:, counted], waits[:, counted]
    steps = times.shape[1]
    if not steps:
        return Window(warmup_steps=warmup_steps, steps=0)
    elapsed = times.sum(axis=1)
    slowest = times[elapsed.argmax()]
    mean, median = float(slowest.mean()), float(np.median(slowest))
    uneven = mean > UNEVEN * median
    return Window(
        warmup_steps=warmup_steps,
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
    slow = times > np.median(times)
    beyond = (times[slow] - np.median(times)).sum()
    waited = np.maximum(0, waits[slow] - np.median(waits[~slow])).sum()
    return "data" if waited >= EXPLAINED * beyond else "unknown"


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
