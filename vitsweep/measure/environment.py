"""Hardware and software that a run was made with."""

import os
import platform
import socket
from pathlib import Path
from typing import Any

import torch

from vitsweep.rates.device import cpu_half_precision, cpu_model, device_name

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "host_allocator": host_allocator(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "huge_pages": huge_pages(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
    }


def host_allocator() -> str:
    """Return the malloc that this process runs with."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return next((name for name in ("jemalloc", "tcmalloc") if f"lib{name}" in maps), "libc")


def huge_pages() -> str:
    """Return whether large tensors of the host lie in transparent huge pages."""
    try:
        text = HUGE_PAGES.read_text(encoding="utf-8")
    except OSError:
        return "none"
    mode = text.partition("[")[2].partition("]")[0]
    wanted = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    return "used" if mode == "always" or (mode == "madvise" and wanted) else "not used"


def machine() -> str:
    """Return an id that differs between machines even where host names do not: the kernel's boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # only a column of the record
        return None
