"""Hardware, software and kernels that a run was made with."""

import os
import platform
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from vitsweep.control_group import allowed_cores
from vitsweep.job_environment import node_name, slurm_job_id
from vitsweep.measure.communication import Observing
from vitsweep.model.initialize import plain_name
from vitsweep.rates.profile import cpu_half_precision, cpu_model, device_name


def environment(device: torch.device) -> dict[str, Any]:
    """Return the environment columns that this rank knows."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device_name("cpu"),
        "device_type": device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "cpu": cpu_model(),
        "cpu_half_precision": cpu_half_precision(),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "host_cores": os.cpu_count(),
        "node": node_name(),
        "host_allocator": host_allocator(),
        "cores_allowed": allowed_cores(),
        "slurm_job_id": slurm_job_id(),
    }


def host_allocator() -> str:
    """Return the malloc that this process runs with."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return next((name for name in ("jemalloc", "tcmalloc") if f"lib{name}" in maps), "libc")


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # only a column of the record
        return None


# Which attention kernel really runs, whichever was asked for.

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (cpu)",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "of the device",
    "flex_attention": "flex",
}
"""Operation that torch dispatches -> kernel."""
SOFTMAX = ("_softmax", "_safe_softmax")
"""Without a fused kernel the scores are normalised by one of these."""


class AttentionKernels:
    """Notes the attention kernels of the operations of a block, see `noted`."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}
        self._softmax = False

    def noted(self) -> AbstractContextManager[Any]:
        """Return a context in which operations are noted."""
        return Observing(self._note)

    @property
    def name(self) -> str | None:
        """The kernels, `math` where none was fused, None where no attention was seen."""
        if self._found:
            return ", ".join(self._found)
        return "math" if self._softmax else None

    def _note(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        short = schema.name.split("::")[-1] if schema else str(getattr(func, "__name__", ""))
        kernel = KERNELS.get(short)
        if kernel:
            self._found[kernel] = None
        elif short in SOFTMAX and args and isinstance(args[0], torch.Tensor) and args[0].ndim > 2:
            self._softmax = True


# How many graphs torch.compile has compiled, and for how long.


@dataclass(frozen=True)
class Compiled:
    """What torch.compile has done in this process.

    Attributes:
        graphs: compiled, each with its backward graph; None where unknown.
        seconds: that it took; None where unknown.
        skipped: CUDA graphs that TorchInductor left out; None where unknown.
    """

    graphs: int | None
    seconds: float | None
    skipped: int | None

    @classmethod
    def so_far(cls) -> "Compiled":
        """Return all that was compiled up to now, from counters that are private to torch.

        A graph that is cut (by a hook, or by DDP's buckets) counts once per part. Why TorchInductor left
        a CUDA graph out it only logs.
        """
        dynamo = sys.modules.get("torch._dynamo.utils")  # importing it takes a second
        if dynamo is None:
            return cls(0, 0.0, 0)
        counters = getattr(dynamo, "counters", None)
        spent = getattr(dynamo, "cumulative_time_spent_ns", None)
        # the first contains the forward graph's compilation by TorchInductor, the second is not
        parts = ("entire_frame_compile", "entire_backward_compile")
        return cls(
            None if counters is None else int(counters["aot_autograd"]["total"]),
            None if spent is None else sum(spent.get(part, 0) for part in parts) / 1e9,
            None if counters is None else int(counters["inductor"]["cudagraph_skips"]),
        )

    def since(self, before: "Compiled") -> "Compiled":
        """Return what was compiled after an earlier call."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Compiled(*(None if None in pair else pair[0] - pair[1] for pair in pairs))


# Which layers multiply in float8, for the record.


def converted_layers(model: nn.Module) -> str | None:
    """Return the names of the linears that multiply in float8, blocks counted together; None for none."""
    kinds = ("Float8Linear", "Mxfp8Linear", "EmulatedMxfp8Linear")
    names = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    found = Counter(re.sub(r"^(.*?blocks)\.\d+\.", r"\1.*.", plain_name(name)) for name in names)
    return ", ".join(f"{count} x {name}" for name, count in found.items()) or None


# Clock, power and throttling of this rank's GPU during the timed window.


INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What the GPU did in a window; the values are None where they are unknown.

    Attributes:
        sm_clock_mhz: mean clock of the streaming multiprocessors.
        power_capped_share: of the samples in which the power limit held the clock down: under full load
            large GPUs run at it all the time.
        throttled: whether heat or the power supply slowed it; the ordinary power limit does not count.
        energy_j: that the device took, from its own counter.
    """

    sm_clock_mhz: float | None = None
    power_capped_share: float | None = None
    energy_j: float | None = None
    throttled: bool | None = None


class DeviceMonitor:
    """A thread that asks NVML about this rank's own device every half second.

    Args:
        device: of this rank; found by its UUID, since NVML counts devices that CUDA does not show.
        interval_s: between two samples.
    """

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self._interval_s, self._stop = interval_s, threading.Event()
        # time, MHz, at the power limit, throttled, J since the driver was loaded
        self._samples: list[tuple[float, float, bool, bool, float | None]] = []
        self._thread = None
        if device.type != "cuda":
            return
        try:
            self._nvml, self._handle = nvml_device(device)
            self._sample()
        except Exception:  # only columns of the record
            return
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, since: float) -> DeviceState:
        """Stop sampling; return the state since `since`, in seconds of `time.perf_counter`."""
        if self._thread is None:
            return DeviceState()
        with suppress(Exception):
            self._sample()
        self._stop.set()
        self._thread.join()
        samples = [sample for sample in self._samples if sample[0] >= since]
        if not samples:
            return DeviceState()
        times, clocks, capped, slow, joules = zip(*samples, strict=True)
        return DeviceState(
            sm_clock_mhz=sum(clocks) / len(clocks),
            power_capped_share=sum(capped) / len(capped),
            energy_j=_energy(times, joules, since),
            throttled=any(slow),
        )

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._sample()
            except Exception:
                return

    def _sample(self) -> None:
        nvml, handle = self._nvml, self._handle
        slow = (
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        sample = (
            time.perf_counter(),
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap),
            bool(reasons & slow),
            self._joules(),
        )
        self._samples.append(sample)

    def _joules(self) -> float | None:
        try:  # GPUs before Volta and MIG slices have no such counter
            # of mJ
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except Exception:
            return None


def _energy(times: Sequence[float], joules: Sequence[float | None], since: float) -> float | None:
    """Return what a counter says from `since` to the last sample, as fast as between the samples."""
    first, last = joules[0], joules[-1]
    if first is None or last is None or times[-1] <= times[0]:
        return None
    return (last - first) * (times[-1] - since) / (times[-1] - times[0])


def nvml_device(device: torch.device) -> tuple[Any, Any]:
    """Return the NVML module and its handle of a CUDA device or MIG slice, found by UUID.

    Raises:
        Exception: there is no NVML, or it does not know the device.
    """
    import pynvml

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid.startswith(("GPU-", "MIG-")):
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


SHARED_CORES_SHARE = 0.15
"""CPU: more than this share of all cores' time spent by processes other than the ranks."""


TICK_S = 0.25
STOPPED_S, RAN_SHARE = 3.0, 0.05
"""A process did not run where its thread slept this much too long and used less CPU time than this share."""


class StopMonitor:
    """A thread that sees when this process did not run: stopped by a signal, or its machine paused.

    A rank that waits for another one, or for a crowded processor, still wakes this thread or uses CPU time.
    """

    def __init__(self) -> None:
        self._end = threading.Event()
        self._stops: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, since: float) -> float:
        """Stop watching; return for how many seconds the process did not run since a `time.perf_counter`."""
        self._end.set()
        self._thread.join()
        return sum(last - max(first, since) for first, last in self._stops if last > since)

    def _run(self) -> None:
        before, used = time.perf_counter(), time.process_time()
        while not self._end.wait(TICK_S):
            now, used_now = time.perf_counter(), time.process_time()
            late = now - before - TICK_S
            if late > STOPPED_S and used_now - used < RAN_SHARE * late:
                self._stops.append((now - late, now))
            before, used = now, used_now


class ContentionMonitor:
    """Compares the CPU time of the whole machine with that of the ranks, over the timed steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._after = psutil.cpu_times()
        self._own_before = sum(own_seconds().values())

    def end(self) -> float:
        """Stop; return the CPU time of this rank since the start, in seconds."""
        self._after = psutil.cpu_times()
        return sum(own_seconds().values()) - self._own_before

    def shared(self, own_seconds_on_node: float) -> bool:
        """Whether something else used this machine's cores, or this rank's GPU, in the window.

        Args:
            own_seconds_on_node: CPU time of all ranks of this node over the window.
        """
        if self._device.type == "cuda":
            try:
                nvml, handle = nvml_device(self._device)
                return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) > 1
            except Exception:  # containers often hide other processes: then nothing is known
                return False
        busy = busy_seconds(self._after) - busy_seconds(self._before)
        whole = sum(self._after) - sum(self._before)
        return (busy - own_seconds_on_node) / max(whole, 1e-9) > SHARED_CORES_SHARE


def seconds_since_start() -> float:
    """Return how long this process lives; by psutil, which rounds starts, it may be a second more."""
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def own_seconds() -> dict[int, float]:
    """Return process id -> CPU seconds of this process and of all that it started."""
    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = float(times.user + times.system)
    return found


def busy_seconds(times: Any) -> float:
    """Return what all cores were busy for, by the machine's CPU times."""
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))  # iowait: Linux only
