"""Whether other processes use the machine while a run is timed."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

# Clock, power and throttling of this rank's GPU during the timed window.


INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What the GPU did in a window; the values are None where they are unknown.

    Attributes:
        sm_clock_mhz: mean clock of the streaming multiprocessors.
        power_w: mean power of the device.
        throttled: whether heat or the power supply slowed it. The ordinary power cap does not
            count: under full load large GPUs run at it all the time.
        energy_j: that the device took, from its own counter.
        reason: why values are unknown, or "".
    """

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    energy_j: float | None = None
    throttled: bool | None = None
    reason: str = ""


class DeviceMonitor:
    """A thread that asks NVML about this rank's own device every half second.

    Args:
        device: of this rank; found by its UUID, since NVML counts devices that CUDA does not show.
        interval_s: between two samples.
    """

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self._interval_s, self._stop = interval_s, threading.Event()
        # time, MHz, W, throttled, J since the driver was loaded
        self._samples: list[tuple[float, float, float, bool, float | None]] = []
        self._reason, self._thread = "", None
        if device.type != "cuda":
            self._reason = "clock and power are read from NVIDIA GPUs only"
            return
        try:
            self._nvml, self._handle = nvml_device(device)
            self._sample()
        except Exception as error:  # only columns of the record
            self._reason = f"NVML does not tell ({error or type(error).__name__})"
            return
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, since: float) -> DeviceState:
        """Stop sampling; return the state since a time of `time.perf_counter`."""
        if self._thread is None:
            return DeviceState(reason=self._reason)
        try:
            self._sample()
        except Exception as error:
            self._reason = f"NVML stopped to tell ({error or type(error).__name__})"
        self._stop.set()
        self._thread.join()
        samples = [sample for sample in self._samples if sample[0] >= since]
        if not samples:
            return DeviceState(reason=self._reason or "no sample within the window")
        times, clocks, watts, slow, joules = zip(*samples, strict=True)
        return DeviceState(
            sm_clock_mhz=sum(clocks) / len(clocks),
            power_w=sum(watts) / len(watts),
            energy_j=_energy(times, joules, since),
            throttled=any(slow),
        )

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._sample()
            except Exception as error:
                self._reason = f"NVML stopped to tell ({error or type(error).__name__})"
                return

    def _sample(self) -> None:
        nvml, handle = self._nvml, self._handle
        slow = (
            nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
            | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        )
        sample = (
            time.perf_counter(),
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,  # given in milliwatts
            bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & slow),
            self._joules(),
        )
        self._samples.append(sample)

    def _joules(self) -> float | None:
        try:  # GPUs before Volta and MIG slices have no such counter
            return (
                float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
            )  # of mJ
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


class ContentionMonitor:
    """Compares the CPU time of the whole machine with that of the ranks, over the timed steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._after = psutil.cpu_times()
        self._own_before = _own_seconds()

    def end(self) -> float:
        """Stop; return the CPU time of this rank since the start, in seconds."""
        self._after = psutil.cpu_times()
        return _own_seconds() - self._own_before

    def shared(self, own_seconds_on_node: float) -> bool:
        """Whether something else used this machine's cores, or this rank's GPU, in the window.

        Args:
            own_seconds_on_node: CPU time of all ranks of this node over the window.
        """
        if self._device.type == "cuda":
            return _processes_on_gpu(self._device) > 1
        busy = _busy(self._after) - _busy(self._before)
        whole = sum(self._after) - sum(self._before)
        return (busy - own_seconds_on_node) / max(whole, 1e-9) > SHARED_CORES_SHARE


def _own_seconds() -> float:
    """CPU time of this rank and of its loader workers."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(_cpu_seconds(process) for process in family)


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _busy(times: Any) -> float:
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))  # iowait: Linux only


def _processes_on_gpu(device: torch.device) -> int:
    try:
        nvml, handle = nvml_device(device)
        return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except Exception:  # containers often hide other processes: then nothing can be said
        return 1
