"""Rates of this machine's processor, from the times of operators at the shapes of planned cells."""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vitsweep.extras.predict.profile_rates import Curve
from vitsweep.extras.predict.step_time import (
    FRESH,
    CollectiveTotal,
    OperatorTotal,
    Rates,
)
from vitsweep.extras.predict.timed_operators import (
    Times,
    exchanged_as,
    kept_times,
    timed_as,
    timed_key,
    timed_ranks,
)
from vitsweep.rates.profile import device_name
from vitsweep.spec.cell_spec import CellSpec

Timed = tuple[str, str, tuple[int, ...], bool]
"""dtype, name and shape of an operator, and whether it is that of the backward pass."""
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
        self._timed_ranks = timed[0]
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
        """Return the measured time of a product or attention; interpolate those of all others by size.

        Raises:
            ValueError: it was not timed.
        """
        if not operator.count:
            return 0.0
        us = self._rated_us(operator) if operator.flops else self._elementwise_us(operator)
        return us * IN_STEPS * self._slower

    def collective_us(self, collective: CollectiveTotal) -> float:
        """Read the measured time of the size; other numbers of ranks by the share that each sends.

        Raises:
            ValueError: it was not timed.
        """
        if collective.group_ranks < 2 or self._timed_ranks < 2:
            return 0.0
        name, dtype = exchanged_as(collective)
        if (name, dtype) not in self._collectives:
            raise ValueError(f"{name} in {dtype} was not timed on this machine")
        alone = self._collectives[name, dtype](max(1.0, float(collective.bytes_whole)))
        here, there = (1 - 1 / ranks for ranks in (collective.group_ranks, self._timed_ranks))
        return (alone * here / there + MESSAGE_US) * self._slower

    def log_error(self, part: str, number_format: str = "") -> float:
        """See `LOG_ERROR`; wider under other ranks and threads than were timed."""
        return LOG_ERROR.get(part, 0.05) * self._wider

    def compiled_dispatch(self) -> float:
        """Return the dispatch time of a compiled step over that of an eager one (B200: 12.6 of 48.8 ms)."""
        return 0.26

    @cached_property
    def _collectives(self) -> dict[tuple[str, str], Curve]:
        """(name, dtype) -> microseconds by bytes."""
        points: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
        for row in self._exchanges:
            points[row["name"], row["dtype"]][float(row["bytes"])] = row["us"]
        return {key: Curve(curve, slope_ends=True) for key, curve in points.items()}

    @cached_property
    def _flops_per_us(self) -> dict[Timed, float]:
        """Of products and attentions."""
        return {
            (row["dtype"], row["name"], tuple(row["shape"]), row["backward"]): _flops(row)
            / row["us"]
            for row in self._operators
            if row["kind"] in ("matmul", "attention")
        }

    def _rated_us(self, operator: OperatorTotal) -> float:
        name, shape = timed_as(operator)
        backward = name == "attention" and "backward" in operator.name
        rate = self._flops_per_us.get((operator.dtype, name, shape, backward))
        if rate is None:
            raise ValueError(f"{name} of {shape} in {operator.dtype} was not timed on this machine")
        return operator.flops / operator.count / rate

    @cached_property
    def _curves(self) -> dict[tuple[str, str], tuple[Curve, Curve]]:
        """(name, dtype) -> microseconds by elements, and by bytes of a call.

        Names of what an optimizer does begin with `optimizer `.
        """
        groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in self._operators:
            if row["kind"] in ("memory", "optimizer"):
                prefix = "optimizer " if row["kind"] == "optimizer" else ""
                groups[prefix + row["name"], row["dtype"]].append(row)
        return {
            key: (
                Curve({r["shape"][0]: r["us"] for r in group}, slope_ends=True),
                Curve({r["bytes_moved"]: r["us"] for r in group}, slope_ends=True),
            )
            for key, group in groups.items()
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


def _alike(dtype: str) -> tuple[str, ...]:
    """Return formats whose measured times may stand for a format's; half precision may be emulated."""
    return (dtype, "float32" if dtype in ("float32", "float64") else "bfloat16")


def _flops(row: Mapping[str, Any]) -> float:
    """Two products of an attention forward; five backward, which computes the scores again."""
    products = 1 if row["kind"] == "matmul" else 5 if row["backward"] else 2
    return 2.0 * products * math.prod(row["shape"])
