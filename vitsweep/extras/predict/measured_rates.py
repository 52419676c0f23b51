"""Rates of a machine from measurements of its own operators (`vitsweep doctor --calibrate`)."""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from vitsweep.extras.predict.calibration import (
    BY_WEIGHT,
    FRESH,
    Calibration,
    Exchanges,
    RankSetup,
    Shapes,
    timed_key,
)
from vitsweep.extras.predict.step_time import CollectiveTotal, OperatorTotal, Rates, StepTrace
from vitsweep.rates.profile import Curve
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Resources

GENERIC = "add"
"""Element-wise operator whose bytes per microsecond stand for those that were not measured."""


UNCALIBRATED = RankSetup(
    ranks=1,
    threads=1,
    operators=(),
    collectives=(),
    scale=1.1,
    message_us=2000.0,
    sent_scale=1.0,
    sent_error=0.5,
    log_error=0.15,
    degrees=18.0,
)
"""A setup without short trainings. Its error is that of the CPU time of 19 drawn steps (0.09, after one
number was fitted to them; see `benchmarks/prediction.py --plan`) with that of a step that runs again (0.11).
Where computing takes all cores, an exchange waits for their time slices, of some milliseconds: 14 exchanges
of a step under FSDP took 33 ms longer than alone."""
DISPATCH_ADDS = 8.0
"""Host time of one dispatched operator of an uncalibrated setup, in additions of 256 numbers."""
UPDATE_DISPATCH = 0.45
"""The same of an operator of the optimizer, which calls no module and no autograd, over that of others."""
LARGEST_EXCHANGE = 1 << 24
"""Bytes of the largest collective that is timed for a plan; two sizes say how longer ones grow."""
FAR_ERROR = 0.1
"""Error of a step that is 4 times longer than all that the calibration timed (assumed)."""


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


def timed_ranks(resources: Resources) -> tuple[int, int]:
    """Return the ranks, two at most, and their threads under which operators of a cell are timed here."""
    cores = len(os.sched_getaffinity(0))
    threads = min(resources.threads_per_rank, cores)
    return max(1, min(2, resources.ranks_per_node, cores // threads)), threads


def shapes_of(traces: Iterable[StepTrace], known: Iterable[dict[str, Any]]) -> Shapes:
    """Return the products and attentions of steps that are not among the known ones, by dtype."""
    timed = {(row["dtype"], row["name"], tuple(row["shape"])) for row in known}
    found: dict[str, dict[tuple[str, tuple[int, ...]], None]] = {"float32": {}}  # the first one
    for operator in (o for trace in traces for o in trace.operators if o.flops):
        name, shape = "attention", operator.shape
        if operator.kind != "attention":
            name, (batch, m, n, k) = _product_name(operator), operator.shape
            shape = operator.shape if name == "bmm" else (1, batch * m, n, k)
        if (operator.dtype, name, shape) not in timed and not operator.dtype.startswith("float8"):
            found.setdefault(operator.dtype, {})[name, shape] = None
    return {dtype: [*wanted] for dtype, wanted in found.items()}


def exchanges_of(traces: Iterable[StepTrace], known: Iterable[dict[str, Any]]) -> Exchanges:
    """Return the collectives of steps that are not among the known ones."""
    timed = {(row["name"], row["dtype"], row["bytes"]) for row in known}
    found: dict[tuple[str, str, int], None] = {}
    for collective in (c for trace in traces for c in trace.collectives if c.group_ranks > 1):
        dtype = collective.dtype if collective.dtype in ("bfloat16", "float16") else "float32"
        size = max(4, collective.bytes_whole)
        few = (size,) if size <= LARGEST_EXCHANGE else (LARGEST_EXCHANGE // 4, LARGEST_EXCHANGE)
        found |= {(_exchange_name(collective), dtype, each): None for each in few}
    return [each for each in found if each not in timed]


def measured_rates(
    known: Calibration, calibrated: bool, cell: CellSpec
) -> "CalibratedRates | None":
    """Return rates for the ranks of a cell; None where nothing was measured.

    Args:
        known: what is kept of this machine's device.
        calibrated: whether its setups hold; the one of the nearest number of ranks is used.
        cell: at whose shapes operators may have been timed.
    """
    resources, ranks, title = cell.resources, cell.resources.ranks_per_node, known.device
    asynchronous = resources.device == "cuda"
    here = timed_ranks(resources)
    timed = known.timed.get(timed_key(*here)) if not asynchronous else None
    if calibrated:
        title += f", calibrated on {known.date}"
        setup = min(known.setups, key=lambda s: (abs(math.log(ranks / s.ranks)), s.ranks))
        if timed and (setup.ranks, setup.threads) == here:
            setup = replace(setup, operators=[*timed["operators"], *setup.operators])
    elif timed:
        title += ", from times of single operators"
        least = min(
            (row for row in timed["operators"] if row["name"] == GENERIC), key=lambda r: r["shape"]
        )
        setup = replace(
            UNCALIBRATED,
            ranks=here[0],
            threads=here[1],
            dispatch_us=DISPATCH_ADDS * least["us"],
            **timed,
        )
    else:
        return None
    return CalibratedRates(
        setup,
        ranks_per_node=ranks,
        threads=resources.threads_per_rank,
        cores=known.cores if calibrated else resources.cores_per_node,
        title=title,
        asynchronous=asynchronous,
    )


class CalibratedRates(Rates):
    """Rates of a measured machine.

    Args:
        setup: measurements under the number of ranks nearest to the cell's.
        ranks_per_node: of the cell.
        threads: of each of its ranks.
        cores: of the node.
        title: of the machine and the calibration.
        asynchronous: whether the device is a GPU.
    """

    compiled_memory: ClassVar[float] = 0.7  # fusion saves some passes over memory (assumed)

    def __init__(
        self,
        setup: RankSetup,
        *,
        ranks_per_node: int,
        threads: int,
        cores: int,
        title: str,
        asynchronous: bool = False,
    ) -> None:
        self.asynchronous = asynchronous  # type: ignore[misc]
        self._setup, self._title = setup, title
        crowd = max(1.0, ranks_per_node * threads / cores)
        measured_crowd = max(1.0, setup.ranks * setup.threads / cores)
        fewer_threads = 1.0 if crowd > 1 else setup.threads / min(threads, setup.threads)
        self._slower = 1.0 if asynchronous else crowd / measured_crowd * fewer_threads
        self._extrapolated = ranks_per_node != setup.ranks or threads != setup.threads

    @property
    def title(self) -> str:
        """Of which machine, and when it was measured."""
        return self._title

    @property
    def dispatch_us(self) -> float:
        """Fitted to whole training steps."""
        return self._setup.dispatch_us * (self._slower if not self.asynchronous else 1.0)

    @property
    def update_dispatch(self) -> float:
        """See `UPDATE_DISPATCH`."""
        return 1.0 if self.asynchronous else UPDATE_DISPATCH

    def fresh_us(self, size: float) -> float:
        """As measured; 0 where it was not, as on a GPU."""
        rows = (row for row in self._setup.operators if row["name"] == FRESH)
        per_byte = min((row["us"] / row["bytes_moved"] for row in rows), default=0.0)
        return size * per_byte * self._setup.scale * self._slower

    def operator_us(self, operator: OperatorTotal, tf32: bool = False) -> float:
        """Interpolate between the nearest measured shapes of the same operator and dtype."""
        if not operator.count:
            return 0.0
        dtype = "tf32" if tf32 and operator.dtype == "float32" else operator.dtype
        bytes_per_call = operator.bytes_moved / operator.count
        flops = operator.flops / operator.count
        if operator.kind in ("matmul", "convolution") and flops:
            us = flops / self._flops_per_us(operator, dtype)
        elif operator.kind == "attention" and flops:
            us = flops / self._attention_flops_per_us(operator, dtype)
        else:
            us = self._elementwise_us(operator, dtype, bytes_per_call)
        return us * self._setup.scale * self._slower

    def collective_us(self, collective: CollectiveTotal) -> float:
        """Read the measured time of the size; other numbers of ranks by the share that each sends."""
        if collective.group_ranks < 2 or not self._setup.collectives:
            return 0.0
        name = _exchange_name(collective)
        wanted = ((name, collective.dtype), (name, "float32"), ("all_reduce", "float32"))
        known = (self._collectives[k] for k in wanted if k in self._collectives)
        curve, ranks = next(known, None) or next(iter(self._collectives.values()))
        size = max(1.0, float(collective.bytes_whole))
        here = (collective.group_ranks - 1) / collective.group_ranks
        alone = curve(size) * here / ((ranks - 1) / ranks) * self._setup.sent_scale
        return (alone + self._setup.message_us) * self._slower

    def log_error(self, part: str) -> float:
        """Return the error of the steps that the calibration timed, wider where it extrapolates."""
        wider = 1.5 if self._extrapolated else 1.0
        if part == "step":
            return self._setup.log_error * wider
        errors = {"communication": self._setup.sent_error, "data": 0.5, "optimizer": 0.1}
        return errors.get(part, 0.05) * wider

    @property
    def degrees(self) -> float:
        """Of freedom, of the short trainings."""
        return self._setup.degrees

    def far_error(self, step_ms: float) -> float:
        """A tenth for each factor of 4 by which a step is shorter or longer than all that were timed."""
        least, most = self._setup.step_ms
        away = max(1.0, least / step_ms, step_ms / most) if step_ms > 0 else 1.0
        return FAR_ERROR * math.log(away) / math.log(4)

    def compiled_dispatch(self, captured: bool) -> float:
        """A compiled step dispatches about a quarter of the operators (B200, 1B model: 12.6 of 48.8 ms)."""
        return 0.05 if captured else 0.26

    def overlap_charge(self, collective: CollectiveTotal) -> float:
        """As the published figure for NVLink (Calculon, SC'23)."""
        return 0.15

    @cached_property
    def _collectives(self) -> dict[tuple[str, str], tuple[Curve, int]]:
        """(name, dtype) -> microseconds by bytes, and the ranks that took part."""
        points: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
        for row in self._setup.collectives:
            points[row["name"], row.get("dtype", "float32")][float(row["bytes"])] = row["us"]
        ranks = self._setup.collectives[0]["ranks"]
        return {key: (Curve(curve, slope_ends=True), ranks) for key, curve in points.items()}

    def _rows(self, *key: str, kinds: Sequence[str]) -> Iterable[tuple[Any, list[dict[str, Any]]]]:
        """Measured operators of some kinds, those of equal values of `key` together."""
        rows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for row in self._setup.operators:
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
            (dtype, BY_WEIGHT if by_weight else name): Neighbours(
                [(row["shape"][0] * row["shape"][1], *row["shape"][2:]) for row in group],
                [2 * math.prod(row["shape"]) / row["us"] for row in group],
            )
            for (dtype, name, by_weight), group in self._rows(
                "dtype", "name", "backward", kinds=("matmul",)
            )
        }

    def _flops_per_us(self, operator: OperatorTotal, dtype: str) -> float:
        batch, m, n, k = operator.shape
        names = (_product_name(operator), "addmm", "mm")
        wanted = ((like, name) for like in _alike(dtype) for name in names)
        known = next((self._products[key] for key in wanted if key in self._products), None)
        if known is None:
            raise ValueError(f"products in {dtype} were not timed on this machine")
        return known((m * batch, n, k))

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

    def _attention_flops_per_us(self, operator: OperatorTotal, dtype: str) -> float:
        backward = "backward" in operator.name
        for key in ((like, backward) for like in _alike(dtype)):
            if known := self._attentions.get(key):
                return known(_attention_position(operator.shape))
        batch, heads, queries, keys, width = operator.shape  # no time was left to measure any
        product = replace(operator, name="mm", shape=(batch * heads, queries, keys, width))
        return self._flops_per_us(product, dtype)

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

    def _elementwise_us(self, operator: OperatorTotal, dtype: str, bytes_per_call: float) -> float:
        elements = float(max(1, operator.shape[0])) if operator.shape else 1.0
        update = operator.kind == "optimizer"
        names = (f"optimizer {operator.name}", operator.name) if update else (operator.name,)
        for name, like in ((name, like) for name in names for like in _alike(dtype)):
            if curves := self._curves.get((name, like)):
                if operator.name.startswith(("_fo", "_fused")):
                    return self._list_us(operator, curves[0], elements)
                return curves[0](elements)
        generic = (f"optimizer {GENERIC}_", GENERIC) if update else (GENERIC,)
        known = (self._curves.get((name, "float32")) for name in generic)
        return next(curves for curves in known if curves)[1](max(1.0, bytes_per_call))

    def _list_us(self, operator: OperatorTotal, curve: Curve, elements: float) -> float:
        """Time of an update of a list of tensors: a share per tensor, the rest per element."""
        measured = [r for r in self._setup.operators if r["name"] == operator.name]
        least = min(measured, key=lambda row: row["shape"][0])
        per_tensor = least["us"] / least["shape"][1]
        tensors = operator.shape[1] if len(operator.shape) > 1 else least["shape"][1]
        return per_tensor * tensors + max(0.0, curve(elements) - least["us"])


def _exchange_name(collective: CollectiveTotal) -> str:
    return "broadcast" if collective.name == "send" else collective.name


def _product_name(operator: OperatorTotal) -> str:
    """Return the product that computes an operator; a convolution is timed as one of a linear layer."""
    name = "bmm" if operator.name == "baddbmm" else operator.name
    return name if name in ("mm", BY_WEIGHT, "bmm") else "addmm"


def _alike(dtype: str) -> tuple[str, ...]:
    """Return formats whose measured times may stand for a format's; half precision may be emulated."""
    return (dtype, "float32" if dtype in ("float32", "tf32", "float64") else "bfloat16")


def _attention_position(shape: Sequence[int]) -> tuple[float, ...]:
    batch, heads, queries, keys, width = shape
    return (batch * heads, queries, keys, width)


def _attention_flops(shape: Sequence[int], backward: bool) -> float:
    """Two products forward; five backward, which computes the scores again."""
    batch, heads, queries, keys, width = shape
    return (5 if backward else 2) * 2.0 * batch * heads * queries * keys * width
