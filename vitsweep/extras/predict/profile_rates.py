"""Rates of a GPU from its profile: a roofline per class of operators, a table of collectives."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from typing import Any

from vitsweep.extras.predict.step_time import CollectiveTotal, OperatorTotal, Rates
from vitsweep.rates.profile import GENERIC, Profile

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
"""Rows and columns of the output that one thread block computes, and its speed relative to the largest
(assumed: small tiles read each input more often)."""
SPLITS = (1, 2, 4, 8, 16)
"""Parts of the inner dimension that different blocks may compute, to be summed afterwards."""
LEAST_INNER = 256
"""Inner dimension below which splitting no longer pays (assumed)."""
TABLES = ("memory_fraction", "attention_fraction_d64", "attention_fraction_d128", "all_reduce_gb_s")
"""Figures that are read between the points of a table."""
LOG_ERROR = {"measured": 0.15, "published": 0.18, "derived": 0.25, "assumed": 0.33}
"""Confidence of the rate of products -> standard deviation of the log of the computing time (assumed
before any comparison; `benchmarks/prediction.py` states how many measurements the intervals hold)."""


OVERHEAD = 1.11
"""Whole steps over the sum of their parts: 1.27 in the median of 139 steps of MPT models under FSDP on A100
(llm-foundry's table), shrunken to what other set-ups may share (exp(0.44 log 1.27)). All other rows of
`benchmarks/published_throughput.py` had no part in it."""
STEP_LOG_ERROR = 0.2
"""Standard deviation of the log of that factor between set-ups, from the same rows."""


class Curve:
    """A positive function of a positive number, linear between points of log x and log y.

    Args:
        points: x -> y, at least one. Beyond the ends the end value holds, or, with `slope_ends`,
            the line through the last two points goes on, flat to proportional.
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
        slope = (self._y[right] - self._y[left]) / (self._x[right] - self._x[left])
        if not self._x[0] <= at <= self._x[-1]:  # one disturbed point must not explode far from it
            end = 0 if at < self._x[0] else -1
            return math.exp(self._y[end] + min(1.0, max(0.0, slope)) * (at - self._x[end]))
        return math.exp(self._y[left] + slope * (at - self._x[left]))


class TableRates(Rates):
    """Rates of a device that is described by a profile.

    Args:
        hardware: the profile.
        overhead: whole steps over the sum of their parts.
    """

    asynchronous = True

    def __init__(self, hardware: Profile, overhead: float = OVERHEAD) -> None:
        self.hardware = hardware
        self.title = f"{hardware.title}, from published figures"
        self.dispatch_us = hardware["dispatch_us"]
        self.step_overhead = overhead
        self.compiled_memory = hardware["compiled_memory_fraction"]
        self._matmul_us = cache(self._uncached_matmul_us)  # layers share their shapes
        self._curves = {
            name: Curve(figure.value)
            for name, figure in hardware.figures
            if figure is not None and name in TABLES
        }

    def operator_us(self, operator: OperatorTotal, tf32: bool = False) -> float:
        """Return the larger of computing and memory time of one call, at least that of a kernel."""
        if not operator.count:
            return 0.0
        bytes_per_call = operator.bytes_moved / operator.count
        dtype = self._dtype(operator.dtype, tf32)
        computing = 0.0
        if operator.kind in ("matmul", "convolution"):
            computing = self._matmul_us(operator.shape, dtype)
        elif operator.kind == "attention":
            width = "d128" if operator.shape[4] > 96 else "d64"
            share = self._curves[f"attention_fraction_{width}"](operator.shape[3])
            rate = share * self._peak(dtype) * self.hardware["sustained_fraction"]
            computing = operator.flops / operator.count / rate / 1e6
        return max(computing, self._memory_us(bytes_per_call), self.hardware["kernel_us"])

    def collective_us(self, collective: CollectiveTotal) -> float:
        """Return the time of one call over NVLink within nodes and network cards between them.

        A collective over several nodes works in two tiers (reduce within the node, exchange one part per
        GPU between nodes, gather within the node), which overlap in part: the shorter adds a third.
        """
        ranks, nodes = collective.group_ranks, collective.group_nodes
        if ranks < 2:
            return 0.0
        per_node = max(1, ranks // nodes)
        size = max(1.0, float(collective.bytes_whole))
        if collective.name == "send":
            return self._send_us(size, nodes > 1)
        passes = 2 if collective.name == "all_reduce" else 1
        inside = self._inside_us(collective.name, size, per_node, passes)
        if nodes == 1:
            return inside
        between = self._between_us(size, per_node, nodes, passes)
        return max(inside, between) + min(inside, between) / 3

    def log_error(self, part: str, number_format: str = "") -> float:
        """Return the assumed error of a part (see `LOG_ERROR`)."""
        computing = LOG_ERROR[self.hardware.figures.matmul_fraction.confidence]
        if self._is_borrowed(number_format):
            computing = max(computing, LOG_ERROR["derived"])
        links = LOG_ERROR[self.hardware.figures.all_reduce_gb_s.confidence]
        launch = math.log(25 / 5) / 2 / 1.2816  # 5 to 25 us per operator as an interval of 80 %
        return {
            "compute": computing,
            "optimizer": 0.2,
            "communication": 2 * links,
            "launch": launch,
            "bubble": computing,
            "data": 0.5,
            "step": STEP_LOG_ERROR,
        }[part]

    def compiled_dispatch(self) -> float:
        """From the profile."""
        return self.hardware["compiled_dispatch_fraction"]

    def overlap_charge(self, collective: CollectiveTotal) -> float:
        """Return the share of multiprocessors that the collective takes from computing."""
        tier = "fabric" if collective.group_nodes > 1 else "link"
        return self.hardware[f"overlap_charge_{tier}"]

    def notes(self, formats: set[str]) -> tuple[str, ...]:
        """Say which rates are guesses for this step."""
        said = []
        name = self.hardware.name
        if self.hardware.figures.matmul_fraction.confidence != "measured":
            said.append(
                f"{name}: no source says which share of its peak products reach, so the interval is wide."
            )
        for dtype in sorted(formats):
            if self._dtype(dtype, False) != _plain(dtype):
                said.append(f"{name} has no peak in {dtype}: {self._dtype(dtype, False)} is used.")
            elif self._is_borrowed(dtype):
                said.append(
                    f"{name}: no source says which share of its {dtype} peak products reach. That of another "
                    "number format is used, so the interval is wide."
                )
        if name == GENERIC:
            said.append(
                "The device is unknown: name one, or a file of your own, by `--hardware`; for jobs, its "
                "type by `hydra.launcher.gpu_type`."
            )
        return tuple(said)

    def _dtype(self, dtype: str, tf32: bool) -> str:
        """Return the number format whose units compute `dtype`."""
        wanted = "tf32" if tf32 and dtype == "float32" else _plain(dtype)
        peaks = self.hardware.peak_tflops
        if wanted in peaks:
            return wanted
        others = {"float8": ("bfloat16",), "float16": ("bfloat16",)}
        return next((dtype for dtype in others.get(wanted, ()) if dtype in peaks), "float32")

    def _peak(self, dtype: str) -> float:
        peaks: Mapping[Any, float] = self.hardware.peak_tflops
        return peaks[dtype]

    def _is_borrowed(self, number_format: str) -> bool:
        """Tell whether the share of the peak that products reach is that of another number format."""
        known = {*self.hardware.figures.matmul_fraction.value, "bfloat16", "float16"}
        return bool(number_format) and self._dtype(number_format, False) not in known

    def _matmul_fraction(self, dtype: str) -> float:
        """Share of the dense peak that the best shape of a product reaches."""
        fractions: dict[Any, float] = self.hardware.figures.matmul_fraction.value
        similar = (dtype, "bfloat16", "float16")
        return next((fractions[d] for d in similar if d in fractions), min(fractions.values()))

    def _uncached_matmul_us(self, shape: tuple[int, ...], dtype: str) -> float:
        """Time of products with tile and wave quantisation, of the best tile and split.

        A wave is one block on every multiprocessor. With C = ceil(m/Tm) ceil(n/Tn) blocks, the last of
        ceil(C / multiprocessors) waves is as long as a full one (NVIDIA, "Matrix multiplication
        background", sections on tile and wave quantisation).
        """
        batch, m, n, k = shape
        units = self.hardware["multiprocessors"]
        rate = (  # FLOPs per microsecond of one multiprocessor
            self._peak(dtype)
            * self._matmul_fraction(dtype)
            * self.hardware["sustained_fraction"]
            * 1e6
            / units
        )
        best = math.inf
        for rows, columns, speed in TILES:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            for split in SPLITS:
                if split > 1 and k / split < LEAST_INNER:
                    break
                waves = math.ceil(tiles * split / units)
                time = waves * 2 * rows * columns * (k / split) / (rate * speed)
                if split > 1:
                    time += self._memory_us(4.0 * split * batch * m * n)
                best = min(best, time)
        return best

    def _memory_us(self, size: float) -> float:
        if size <= 0:
            return 0.0
        share = self._curves["memory_fraction"](size)
        return size / (share * self.hardware["memory_tb_s"] * 1e6)

    def _bus_gb_s(self, name: str, size: float, ranks: int) -> float:
        """Bus bandwidth within a node; the switch reduces all-reduces only, from 5 GPUs on."""
        rate = self._curves["all_reduce_gb_s"](size)
        if name != "all_reduce" or ranks < 5:
            rate *= self.hardware["gather_over_reduce"]
        return rate

    def _inside_us(self, name: str, size: float, ranks: int, passes: int) -> float:
        if ranks < 2:
            return 0.0
        return passes * (ranks - 1) / ranks * size / self._bus_gb_s(name, size, ranks) / 1e3

    def _between_us(self, size: float, per_node: int, nodes: int, passes: int) -> float:
        wire = self.hardware["fabric_fraction"] * self.hardware["nic_gb_s"] * 1e3  # bytes per us
        share = (nodes - 1) / nodes * size / per_node
        latency = self.hardware["fabric_pass_us"] * math.log2(nodes)
        return passes * (latency + share / wire)

    def _send_us(self, size: float, between_nodes: bool) -> float:
        if between_nodes:
            wire = self.hardware["fabric_fraction"] * self.hardware["nic_gb_s"]
            return self.hardware["fabric_pass_us"] / 2 + size / wire / 1e3
        return 2 * self.hardware["kernel_us"] + size / (0.8 * self.hardware["link_gb_s"]) / 1e3


def _plain(dtype: str) -> str:
    return "float8" if dtype.startswith("float8") else dtype
