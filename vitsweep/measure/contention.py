"""Whether other processes use the machine while a run is timed."""

from typing import Any

import psutil
import torch

from vitsweep.measure.device_monitor import nvml_device

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
