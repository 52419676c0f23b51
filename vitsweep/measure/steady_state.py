"""Where warm-up ends, and whether what follows still drifts, decided from the samples."""

import numpy as np
from scipy import stats

DRIFT_SHARE = 0.05
"""A trend that moves the step time by more than this share within a run counts as drift."""


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
