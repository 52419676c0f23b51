"""Tables of measured rates, read between their points on logarithmic scales."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence


class Curve:
    """A positive function of a positive number, linear between points of log x and log y.

    Args:
        points: x -> y, at least one. Beyond the ends the end value holds, or, with `slope_ends`,
            the line through the last two points goes on.
        slope_ends: whether the curve goes on beyond its ends.
    """

    def __init__(self, points: Mapping[float, float], slope_ends: bool = False) -> None:
        ordered = sorted(points.items())
        self._x = [math.log(x) for x, _ in ordered]
        self._y = [math.log(y) for _, y in ordered]
        self._slope_ends = slope_ends and len(ordered) > 1

    def __call__(self, x: float) -> float:
        """Return the value at x."""
        at = math.log(max(x, 1e-30))
        if not self._slope_ends:
            at = min(max(at, self._x[0]), self._x[-1])
        if len(self._x) == 1:
            return math.exp(self._y[0])
        right = min(max(bisect_right(self._x, at), 1), len(self._x) - 1)
        left = right - 1
        share = (at - self._x[left]) / (self._x[right] - self._x[left])
        return math.exp(self._y[left] + share * (self._y[right] - self._y[left]))


class Neighbours:
    """A positive function of several positive numbers, from the nearest measured points.

    The logarithm is averaged over the nearest points, weighted by the inverse fourth power of the
    distance in log2 space (Shepard, "A two-dimensional interpolation function", 1968).

    Args:
        points: positions, all of one length.
        values: one per position.
        nearest: number of points that count.
    """

    def __init__(
        self, points: Sequence[Sequence[float]], values: Sequence[float], nearest: int = 5
    ) -> None:
        self._points = [[math.log2(max(x, 1.0)) for x in point] for point in points]
        self._values = [math.log(value) for value in values]
        self._nearest = nearest

    def __call__(self, position: Sequence[float]) -> float:
        """Return the value at a position."""
        at = [math.log2(max(x, 1.0)) for x in position]
        distances = sorted(
            (sum((a - b) ** 2 for a, b in zip(at, point, strict=True)), value)
            for point, value in zip(self._points, self._values, strict=True)
        )[: self._nearest]
        if distances[0][0] < 1e-9:
            return math.exp(distances[0][1])
        weights = [1 / distance**2 for distance, _ in distances]
        total = sum(w * value for w, (_, value) in zip(weights, distances, strict=True))
        return math.exp(total / sum(weights))
