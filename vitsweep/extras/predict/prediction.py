"""What is known about a cell before it runs: memory, bytes sent, step time, hours, cost (no torch)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import psutil

from vitsweep.extras.predict.measured_rates import measured_rates
from vitsweep.extras.predict.profile_rates import TableRates
from vitsweep.extras.predict.step_time import (
    PARTS,
    Rates,
    StepTimePrediction,
    StepTrace,
    predict_step,
)
from vitsweep.extras.predict.timed_operators import time_operators
from vitsweep.extras.predict.trace_pool import trace_cells
from vitsweep.measure.utilization import IMAGENET_1K_IMAGES
from vitsweep.planning.blocks import SETUP_SECONDS, run_seconds
from vitsweep.rates.profile import (
    GENERIC,
    Profile,
    device_name,
    generic_gpu,
    profile_named,
    profile_of,
)
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine

SETUP_INTERVAL_SECONDS = (5.0, 45.0)
"""80 % of runs on several nodes are meant to lie between: up to many nodes that import from a network file
system (assumed)."""
CPU_SETUP_SECONDS = (1.5, 0.5, 10.0)
"""Set-up of a run and its interval on one node without a GPU: 0.65 to 0.9 s a run, with the proof 2 to 5 s,
on two cores of a Xeon; the processes are forked from one that has imported all."""
GPU_SETUP_SECONDS = (2.7, 2.0, 15.0)
"""The same on one node with GPUs, mean of five runs on one H200: 0.8 s, 1.4 s between runs, and in the first
2 to 3 s of proof. Compiled cells take 9 to 20 s."""
SPAWN_SECONDS = (3.0, 2.0, 10.0)
"""What a spawned rank adds: 2.7 s of one core of a Xeon for its own imports; ranks share the cores."""

# The step time of a cell: its trace, and the rates of the machine it would run on.


DECODE_MS = 2.0
"""Decoding and resizing one JPEG of 500 x 375 pixels: 0.62 + 1.40 ms with Pillow 13 on one core of a
Xeon."""


def predict_cell(
    cell: CellSpec, trace: StepTrace, profile: Profile | None = None
) -> StepTimePrediction:
    """Predict the step time of a cell.

    Args:
        cell: the cell; its number of ranks per node says what shares a node.
        trace: of its busiest rank.
        profile: of the device; None for this machine's.

    Raises:
        ValueError: operators of a cell on a CPU were not timed here.
    """
    rates: Rates | None = TableRates(profile or _profile_here() or generic_gpu())
    if cell.resources.device == "cpu":
        rates = measured_rates(cell)
    if rates is None:
        raise ValueError("its operators were not timed on this machine; `plan` times them")
    return predict_step(
        trace,
        rates,
        tf32=cell.precision.plan().tf32,
        input_ms=_input_ms(cell),
    )


@cache
def _profile_here() -> Profile | None:
    """Return the profile of this machine's GPU; None where it is unknown."""
    name = device_name("cuda")
    return profile_of(name, complete=True) if name else None


def _profile_on(machine: Machine | None) -> Profile | None:
    """Return the profile of a machine's GPUs: of several that differ in their memory alone the first one.

    Where step times differ between them, or none is known, it is the generic one.
    """
    if machine is None or machine.profiles is None:
        return _profile_here()

    def rates(profile: Profile) -> object:  # what step times depend on
        figures = {n: (f.value, f.confidence) for n, f in profile.figures if f}
        return profile.peak_tflops, {**figures, "memory_gib": None}

    first, *others = [profile_named(name) for name in machine.profiles] or [generic_gpu()]
    return first if all(rates(other) == rates(first) for other in others) else generic_gpu()


def _input_ms(cell: CellSpec) -> float:
    """Time in which the workers of one rank prepare the images of a step; 0 where they are in memory."""
    workers = getattr(cell.data, "num_workers", None)
    if workers is None:
        return 0.0
    images = cell.micro_batch * cell.batch.accumulation_steps
    return images * DECODE_MS / max(1, workers)


GIB = 2**30
PROCESS_GIB = 0.41
"""Resident memory of a Python process with PyTorch, before it holds a model (torch 2.13 for CPU)."""
MEMORY_LOG_ERROR = 0.05
"""Largest error of a traced peak against torch's trackers, as a share (see `benchmarks/README.md`)."""
PURPOSES = ("parameter", "gradient", "optimizer", "activation")
HOURS = "hours device_hours device_hours_low device_hours_high".split()


@dataclass(frozen=True, kw_only=True)
class CellPrediction:
    """A cell's prediction on one kind of device.

    Attributes:
        cell: what is predicted.
        trace: of its busiest rank; None where it could not be traced.
        step_time: None where there is no trace.
        limit_bytes: memory of one rank; None where it is unknown.
        reason: why there is no trace or no step time, or "".
    """

    cell: CellSpec
    trace: StepTrace | None
    step_time: StepTimePrediction | None
    limit_bytes: float | None
    reason: str = ""

    @property
    def peak_bytes(self) -> float | None:
        """Peak of the busiest rank, on CPU with that of the process itself."""
        if self.trace is None:
            return None
        return self.trace.memory.peak + process_bytes(self.cell)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is below the limit; None where either is unknown."""
        if self.peak_bytes is None or self.limit_bytes is None:
            return None
        return self.peak_bytes <= self.limit_bytes

    @property
    def is_too_large(self) -> bool:
        """Whether even a peak that is smaller by twice the error would not fit.

        False where the trace counts a choice as another one, which may need more memory.
        """
        if self.trace is None or self.trace.notes or self.limit_bytes is None:
            return False
        assert self.peak_bytes is not None
        return (1 - 2 * MEMORY_LOG_ERROR) * self.peak_bytes > self.limit_bytes

    @property
    def why_not(self) -> str:
        """A sentence that says why the cell will not fit; "" where it may."""
        if self.fits is not False:
            return ""
        assert self.peak_bytes is not None
        assert self.limit_bytes is not None
        digits = 1 if round(self.peak_bytes / GIB, 1) != round(self.limit_bytes / GIB, 1) else 3
        return (
            f"{self.peak_bytes / GIB:.{digits}f} GiB per rank are predicted at the peak, and "
            f"there are {self.limit_bytes / GIB:.{digits}f}: use a smaller batch, "
            "`memory=recompute_blocks` or `sharding=fsdp`, or `sweep.try_anyway=true`"
        )

    @property
    def run_device_hours(self) -> tuple[float, float, float] | None:
        """(expected, low, high) hours x ranks of one run with its training, the ends of an interval of 80 %.

        None where the step time or the length of the training is unknown.
        """
        if self.step_time is None:
            return None
        step, resources = self.step_time, self.cell.resources
        of_a_node = CPU_SETUP_SECONDS if resources.device == "cpu" else GPU_SETUP_SECONDS
        setup = of_a_node if resources.nodes == 1 else (SETUP_SECONDS, *SETUP_INTERVAL_SECONDS)
        is_spawned = self.cell.measurement.start == "spawned" and resources.nodes == 1
        turns = is_spawned * max(1.0, resources.ranks_per_node / resources.cores_per_node)
        begin = (own + turns * more for own, more in zip(setup, SPAWN_SECONDS, strict=True))
        each = zip((step.step_time_ms, step.low_ms, step.high_ms), begin, strict=True)
        expected, low, high = (run_seconds(self.cell, ms, start) for ms, start in each)
        if expected is None or low is None or high is None:
            return None
        ranks = resources.world_size
        return expected / 3600 * ranks, low / 3600 * ranks, high / 3600 * ranks

    def columns(self, runs: int = 0) -> dict[str, float | str | bool | None]:
        """Return the columns of a plan; None where a figure is not known.

        Args:
            runs: of the cell that are to be made.
        """
        if self.trace is None:
            return {"why_not_predicted": self.reason}
        memory = self.trace.memory
        sent = dict.fromkeys((f"{purpose}_bytes_per_step" for purpose in PURPOSES), 0.0)
        for c in self.trace.collectives:
            for name in (c.purpose, f"{c.name}_{c.purpose}"):
                column = f"{name}_bytes_per_step"
                sent[column] = sent.get(column, 0.0) + c.bytes_sent
        return {
            "num_parameters": self.trace.parameters,
            "flops_per_step_and_rank": self.trace.flops_per_step,
            "peak_gib": (self.peak_bytes or 0) / GIB,
            "parameter_gib": memory.parameters / GIB,
            "gradient_gib": memory.gradients / GIB,
            "optimizer_state_gib": memory.optimizer / GIB,
            "activation_gib": memory.activations / GIB,
            "gathered_parameter_gib": memory.gathered / GIB,
            "buffer_gib": memory.buffers / GIB,
            "limit_gib": self.limit_bytes / GIB if self.limit_bytes else None,
            "fits": self.fits,
            **sent,
            **self._time_columns(runs),
            "notes": "\n".join(self.step_time.notes if self.step_time else self.trace.notes),
            **({"why_not_predicted": self.reason} if self.reason else {}),
        }

    def _time_columns(self, runs: int) -> dict[str, float | str | bool | None]:
        if self.step_time is None:
            return {}
        step = self.step_time
        images_per_second = self.cell.images_per_step / step.step_time_ms * 1e3
        return {
            "step_time_ms": step.step_time_ms,
            "step_time_low_ms": step.low_ms,
            "step_time_high_ms": step.high_ms,
            **{f"{part}_ms": step.parts_ms[part] for part in PARTS},
            "regime": step.regime,
            "images_per_second": images_per_second,
            "ranks": self.cell.resources.world_size,
            "epoch_hours_imagenet1k": IMAGENET_1K_IMAGES / images_per_second / 3600,
            **self._hours_columns(runs),
            "rates": step.rates,
        }

    def _hours_columns(self, runs: int) -> dict[str, float | str | bool | None]:
        """Hours of `runs` runs; None where their length is unknown."""
        if self.run_device_hours is None:
            return dict.fromkeys(HOURS)
        expected, low, high = (runs * hours for hours in self.run_device_hours)
        return {
            "hours": expected / self.cell.resources.world_size,
            "device_hours": expected,
            "device_hours_low": low,
            "device_hours_high": high,
        }


def predict_cells(
    cells: Mapping[str, CellSpec],
    hardware: str | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    only_cached: bool = False,
    seconds: float | None = None,
    times_operators: bool = True,
    machine: Machine | None = None,
) -> dict[str, CellPrediction]:
    """Return name -> prediction of each cell.

    Nothing that goes wrong in a prediction is raised: it is the `reason` why a cell has none.

    Args:
        cells: name -> cell.
        hardware: a device or a profile file, see `rates.profile`; None for this machine.
        progress: called with how many traces are done, and how many are made.
        only_cached: predict only cells that were traced before, and time nothing.
        seconds: see `trace_cells`.
        times_operators: time the operators that step times on this machine need, and were not timed before.
        machine: on which the cells will run, which knows its GPUs; None for this one.

    Raises:
        BadValueError: the hardware is unknown.
    """
    profile = profile_named(hardware) if hardware else _profile_on(machine)
    gib_per_device = machine.gib_per_device if machine else None
    on_cpu = {n for n, cell in cells.items() if hardware and cell.resources.device == "cpu"}
    elsewhere = {name: cell for name, cell in cells.items() if name not in on_cpu}
    traces: dict[str, StepTrace | str]
    try:
        traces = trace_cells(elsewhere, progress=progress, only_cached=only_cached, seconds=seconds)
    except Exception as error:  # such as no process could be started
        traces = dict.fromkeys(
            elsewhere, f"no step can be traced here ({type(error).__name__}: {error})"
        )
    untimed = ""
    if times_operators and not (hardware or only_cached):
        pairs = [(cells[n], t) for n, t in traces.items() if isinstance(t, StepTrace)]
        try:
            time_operators((c, t) for c, t in pairs if c.resources.device == "cpu")
        except Exception as error:  # such as a busy machine: the command goes on
            untimed = f" ({error})"
    traces |= dict.fromkeys(
        on_cpu,
        f"`resources.device=cpu` runs on no `--hardware {hardware}`: leave out one of them",
    )
    return {
        name: _predict(cells[name], traces[name], profile, gib_per_device, untimed)
        for name in cells
        if name in traces
    }


def _predict(
    cell: CellSpec,
    trace: StepTrace | str,
    profile: Profile | None,
    gib_per_device: float | None,
    untimed: str,
) -> CellPrediction:
    traced, reason = (None, trace) if isinstance(trace, str) else (trace, "")
    step = None
    if traced:
        try:
            step = predict_cell(cell, traced, profile)
        except Exception as error:  # of a formula: the command goes on
            reason = f"its step time is unknown: {error}{untimed}"
    return CellPrediction(
        cell=cell,
        trace=traced,
        step_time=step,
        limit_bytes=limit_bytes(cell, profile, gib_per_device),
        reason=reason,
    )


def process_bytes(cell: CellSpec) -> float:
    """Memory of a rank's process besides its tensors, on a CPU; what a GPU holds is tensors."""
    return PROCESS_GIB * GIB if cell.resources.device == "cpu" else 0.0


def limit_bytes(
    cell: CellSpec, profile: Profile | None = None, gib_per_device: float | None = None
) -> float | None:
    """Memory of one rank: its budget, the GPU's, or its share of this machine's; None if unknown.

    A budget is for what a process takes beyond what it has in use before it builds the model.
    """
    if cell.resources.device == "cuda":
        known = gib_per_device * GIB if gib_per_device else None
        is_named = profile and profile.name != GENERIC
        return profile.usable_bytes if profile and is_named and not known else known
    if cell.resources.memory_gib_per_rank:
        return cell.resources.memory_gib_per_rank * GIB + process_bytes(cell)
    return float(psutil.virtual_memory().total) / cell.resources.ranks_per_node
