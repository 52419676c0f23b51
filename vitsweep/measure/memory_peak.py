"""Peak memory of this rank: the allocator's on CUDA, the process's on CPU."""

import re
from pathlib import Path

import torch

GIB = 2**30


def reset_peak(device: torch.device) -> None:
    """Start a new peak, before the model is built."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
    except OSError:
        pass  # a kernel or container that forbids it: the peak then covers the whole process


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Return the peak columns of the record for this rank, in GiB; what does not apply is None."""
    if device.type == "cuda":
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "peak_rss_gib": None,
        }
    return {"peak_allocated_gib": None, "peak_reserved_gib": None, "peak_rss_gib": _peak_rss_gib()}


def _peak_rss_gib() -> float | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 / GIB if found else None
