"""What earlier records say about the errors of predictions on one device.

The logarithm of measured over predicted step time is explained by one term for the device and one for
each choice of a technique group, all shrunken towards zero (ridge regression: a normal prior of
standard deviation `PRIOR` on every term), so that one record changes little and twenty change much.
What remains gives the width of intervals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

PRIOR = 0.15
"""Standard deviation of a choice's term before any record: choices are mispredicted by some 15 %."""
DEVICE_PRIOR = 0.5
"""The same of the term of the device."""
FEWEST_RECORDS = 3
FEWEST_FOR_WIDTH = 8
"""Records from which their own spread, instead of the rates' stated error, sets the interval."""


@dataclass(frozen=True)
class ResidualModel:
    """Corrections of log(step time).

    Attributes:
        device: log correction that all cells of the device share.
        terms: (group, choice) -> log correction.
        spread: standard deviation of what the terms leave unexplained; None without enough records.
        records: number of records behind it.
    """

    device: float = 0.0
    terms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    spread: float | None = None
    records: int = 0

    @property
    def title(self) -> str:
        """By how many records the prediction is corrected."""
        return f", corrected by {self.records} records" if self.records else ""

    def correction(self, settings: Mapping[str, str], log_error: float) -> tuple[float, float]:
        """Return (log shift, standard deviation of the log) for a cell.

        Args:
            settings: choices of the technique groups.
            log_error: the standard deviation that the rates state by themselves.
        """
        shift = self.device + sum(self.terms.get(item, 0.0) for item in settings.items())
        if self.spread is None:
            return shift, log_error
        unseen = sum(item not in self.terms for item in settings.items())
        return shift, math.hypot(self.spread, PRIOR * math.sqrt(unseen) if unseen else 0.0)


NO_RESIDUALS = ResidualModel()


def fit_residuals(
    settings: Sequence[Mapping[str, str]],
    measured_ms: Sequence[float],
    predicted_ms: Sequence[float],
) -> ResidualModel:
    """Fit the corrections of one device.

    Args:
        settings: choices of the technique groups of each record.
        measured_ms: step time of each record.
        predicted_ms: step time that the rates alone predict for it, without any correction.
    """
    logs = [
        math.log(m / p) if m > 0 and p > 0 else math.nan
        for m, p in zip(measured_ms, predicted_ms, strict=True)
    ]
    kept = [(dict(s), log) for s, log in zip(settings, logs, strict=True) if math.isfinite(log)]
    if len(kept) < FEWEST_RECORDS:
        return NO_RESIDUALS
    names = sorted({item for chosen, _ in kept for item in chosen.items()})
    matrix = np.array([[1.0, *(item in s.items() for item in names)] for s, _ in kept], dtype=float)
    target = np.array([log for _, log in kept])
    noise = max(0.05, float(np.std(target)) / 2)
    penalty = np.diag([(noise / DEVICE_PRIOR) ** 2, *[(noise / PRIOR) ** 2] * len(names)])
    inner = np.linalg.inv(matrix.T @ matrix + penalty)
    terms = inner @ matrix.T @ target
    spread = None
    if len(kept) >= FEWEST_FOR_WIDTH:
        # Leave-one-out errors: in-sample ones would be too small where terms are many.
        hat = np.einsum("ij,jk,ik->i", matrix, inner, matrix)
        left_out = (target - matrix @ terms) / (1 - np.minimum(hat, 0.95))
        spread = max(0.03, float(np.sqrt(np.mean(left_out**2))))
    return ResidualModel(
        device=float(terms[0]),
        terms=dict(zip(names, map(float, terms[1:]), strict=True)),
        spread=spread,
        records=len(kept),
    )
