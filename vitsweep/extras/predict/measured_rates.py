"""Rates of this machine's processor, from the times of operators at the shapes of planned cells."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from vitsweep.extras.predict.step_time import (
    FRESH,
    CollectiveTotal,
    OperatorTotal,
    Rates,
)
from vitsweep.extras.predict.timed_operators import (
    Times,
    exchange_name,
    kept_times,
    product_name,
    timed_key,
    timed_ranks,
)
from vitsweep.rates.profile import Curve, device_name
from vitsweep.spec.cell_spec import CellSpec

GENERIC = "add"
"""Element-wise operator whose bytes per microsecond stand for those that were not measured."""
IN_STEPS = 1.1
"""Computing time in training steps relative to operators alone."""
MESSAGE_US = 2000.0
"""What each exchange adds within a step. Where computing takes all cores, it waits for their time slices, of
some milliseconds: 14 exchanges of a step under FSDP took 33 ms longer than alone."""
LOG_ERROR = {"step": 0.15, "communication": 0.5, "data": 0.5, "optimizer": 0.1}
"""Of parts of a step; 0.05 of the others. That of the step is the error of the CPU time of 19 drawn steps
(0.09, after one number was fitted to them; see `benchmarks/prediction.py`) with that of a step that runs
again (0.11)."""
DISPATCH_ADDS = 8.0
"""Host time of one dispatched operator, in additions of 256 numbers."""
UPDATE_DISPATCH = 0.45
"""The same of an operator of the optimizer, which calls no module and no autograd, over that of others."""


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


def measured_rates(cell: CellSpec) -> "MeasuredRates | None":
    """Return rates for the ranks of a cell on this machine's processor; None where nothing was timed."""
    ranks, threads = timed_ranks(cell.resources)
    times = kept_times().get(timed_key(ranks, threads))
    if not times or not times["operators"]:
        return None
    return MeasuredRates(
        times,
        timed=(ranks, threads),
        used=(cell.resources.ranks_per_node, cell.resources.threads_per_rank),
        cores=cell.resources.cores_per_node,
        device=str(device_name("cpu")),
    )


class MeasuredRates(Rates):
    """Rates of a measured processor.

    Args:
        times: of operators and collectives.
        timed: ranks and threads of each, under which they were timed.
        used: the same of the cell, on one node.
        cores: of the node.
        device: its name.
    """

    asynchronous = False
    update_dispatch = UPDATE_DISPATCH
    degrees = 18.0  # of `LOG_ERROR`
    compiled_memory = 0.7  # fusion saves some passes over memory (assumed)

    def __init__(
        self,
        times: Times,
        *,
        timed: tuple[int, int],
        used: tuple[int, int],
        cores: int,
        device: str,
    ) -> None:
        self._operators, self._exchanges = times["operators"], times["collectives"]
        self.title = f"{device}, from times of single operators"
        crowd, timed_crowd = (max(1.0, math.prod(ranks) / cores) for ranks in (used, timed))
        fewer_threads = 1.0 if crowd > 1 else timed[1] / min(used[1], timed[1])
        self._slower = crowd / timed_crowd * fewer_threads
        self._wider = 1.5 if used != timed else 1.0
        adds = (row for row in self._operators if row["name"] == GENERIC)
        least = min(adds, key=lambda row: row["shape"])
        self.dispatch_us = DISPATCH_ADDS * float(least["us"]) * self._slower

    def fresh_us(self, size: float) -> float:
        """As measured."""
        rows = (row for row in self._operators if row["name"] == FRESH)
        per_byte = min((row["us"] / row["bytes_moved"] for row in rows), default=0.0)
        return size * per_byte * IN_STEPS * self._slower

    def operator_us(self, operator: OperatorTotal, tf32: bool = False) -> float:
        """Interpolate between the nearest measured shapes of the same operator and dtype."""
        if not operator.count:
            return 0.0
        flops = operator.flops / operator.count
        if operator.kind in ("matmul", "convolution") and flops:
            us = flops / self._flops_per_us(operator)
        elif operator.kind == "attention" and flops:
            us = flops / self._attention_flops_per_us(operator)
        else:
            us = self._elementwise_us(operator)
        return us * IN_STEPS * self._slower

    def collective_us(self, collective: CollectiveTotal) -> float:
        """Read the measured time of the size; other numbers of ranks by the share that each sends."""
        if collective.group_ranks < 2 or not self._exchanges:
            return 0.0
        name = exchange_name(collective.name)
        wanted = ((name, collective.dtype), (name, "float32"), ("all_reduce", "float32"))
        known = (self._collectives[k] for k in wanted if k in self._collectives)
        curve = next(known, None) or next(iter(self._collectives.values()))
        ranks = self._exchanges[0]["ranks"]
        size = max(1.0, float(collective.bytes_whole))
        here = (collective.group_ranks - 1) / collective.group_ranks
        return (curve(size) * here / ((ranks - 1) / ranks) + MESSAGE_US) * self._slower

    def log_error(self, part: str) -> float:
        """See `LOG_ERROR`; wider under other ranks and threads than were timed."""
        return LOG_ERROR.get(part, 0.05) * self._wider

    def compiled_dispatch(self, captured: bool) -> float:
        """A compiled step dispatches about a quarter of the operators (B200, 1B model: 12.6 of 48.8 ms)."""
        return 0.05 if captured else 0.26

    @cached_property
    def _collectives(self) -> dict[tuple[str, str], Curve]:
        """(name, dtype) -> microseconds by bytes."""
        points: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
        for row in self._exchanges:
            points[row["name"], row["dtype"]][float(row["bytes"])] = row["us"]
        return {key: Curve(curve, slope_ends=True) for key, curve in points.items()}

    def _rows(self, *key: str, kinds: Sequence[str]) -> Iterable[tuple[Any, list[dict[str, Any]]]]:
        """Measured operators of some kinds, those of equal values of `key` together."""
        rows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for row in self._operators:
            if row["kind"] in kinds:
                rows[tuple(row[part] for part in key)].append(row)
        return rows.items()

    @cached_property
    def _products(self) -> dict[tuple[str, str], Neighbours]:
        """(dtype, `addmm`, `mm` or `mm.t`) -> FLOPs per microsecond by (m, n, k).

        Products of the forward pass and of the gradients of inputs and of weights reach different rates: in
        bfloat16, emulated on one core of a Xeon, 2 to 10, 1 to 2 and 6 to 15 GFLOP/s at 68 tokens.
        """
        return {
            key: Neighbours(
                [(row["shape"][0] * row["shape"][1], *row["shape"][2:]) for row in group],
                [2 * math.prod(row["shape"]) / row["us"] for row in group],
            )
            for key, group in self._rows("dtype", "name", kinds=("matmul",))
        }

    def _flops_per_us(self, operator: OperatorTotal) -> float:
        batch, m, n, k = operator.shape
        names = (product_name(operator), "addmm", "mm")
        keys = [(like, name) for like in _alike(operator.dtype) for name in names]
        return _known(self._products, keys, "products", operator.dtype)((m * batch, n, k))

    @cached_property
    def _attentions(self) -> dict[tuple[str, bool], Neighbours]:
        return {
            key: Neighbours(
                [_attention_position(row["shape"]) for row in group],
                [_attention_flops(row["shape"], key[1]) / row["us"] for row in group],
                nearest=3,
            )
            for key, group in self._rows("dtype", "backward", kinds=("attention",))
        }

    def _attention_flops_per_us(self, operator: OperatorTotal) -> float:
        keys = [(like, "backward" in operator.name) for like in _alike(operator.dtype)]
        known = _known(self._attentions, keys, "attention", operator.dtype)
        return known(_attention_position(operator.shape))

    @cached_property
    def _curves(self) -> dict[tuple[str, str], tuple[Curve, Curve]]:
        """(name, dtype) -> microseconds by elements, and by bytes of a call.

        Names of what an optimizer does begin with `optimizer `.
        """
        return {
            (f"optimizer {name}" if kind == "optimizer" else name, dtype): (
                Curve({r["shape"][0]: r["us"] for r in group}, slope_ends=True),
                Curve({r["bytes_moved"]: r["us"] for r in group}, slope_ends=True),
            )
            for kind in ("memory", "optimizer")
            for (name, dtype), group in self._rows("name", "dtype", kinds=(kind,))
        }

    def _elementwise_us(self, operator: OperatorTotal) -> float:
        elements = float(max(1, operator.shape[0])) if operator.shape else 1.0
        update = operator.kind == "optimizer"
        names = (f"optimizer {operator.name}", operator.name) if update else (operator.name,)
        for key in ((name, like) for name in names for like in _alike(operator.dtype)):
            if curves := self._curves.get(key):
                if operator.name.startswith(("_fo", "_fused")):
                    return self._list_us(operator, curves[0], elements)
                return curves[0](elements)
        generic = (f"optimizer {GENERIC}_", GENERIC) if update else (GENERIC,)
        known = (self._curves.get((name, "float32")) for name in generic)
        return next(curves for curves in known if curves)[1](
            max(1.0, operator.bytes_moved / operator.count)
        )

    def _list_us(self, operator: OperatorTotal, curve: Curve, elements: float) -> float:
        """Time of an update of a list of tensors: a share per tensor, the rest per element."""
        measured = [r for r in self._operators if r["name"] == operator.name]
        least = min(measured, key=lambda row: row["shape"][0])
        per_tensor = least["us"] / least["shape"][1]
        tensors = operator.shape[1] if len(operator.shape) > 1 else least["shape"][1]
        return per_tensor * tensors + max(0.0, curve(elements) - least["us"])


def _known(
    table: Mapping[Any, Neighbours], keys: Iterable[Any], what: str, dtype: str
) -> Neighbours:
    """Return the first that is there.

    Raises:
        ValueError: none is.
    """
    known = next((table[key] for key in keys if key in table), None)
    if known is None:
        raise ValueError(f"{what} in {dtype} were not timed on this machine")
    return known


def _alike(dtype: str) -> tuple[str, ...]:
    """Return formats whose measured times may stand for a format's; half precision may be emulated."""
    return (dtype, "float32" if dtype in ("float32", "float64") else "bfloat16")


def _attention_position(shape: Sequence[int]) -> tuple[float, ...]:
    batch, heads, queries, keys, width = shape
    return (batch * heads, queries, keys, width)


def _attention_flops(shape: Sequence[int], backward: bool) -> float:
    """Two products forward; five backward, which computes the scores again."""
    batch, heads, queries, keys, width = shape
    return (5 if backward else 2) * 2.0 * batch * heads * queries * keys * width
