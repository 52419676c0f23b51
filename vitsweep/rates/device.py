"""Names of this machine's processor and accelerator, without loading torch."""

import os
import platform
import re
from pathlib import Path

HALF_PRECISION = ("amx_bf16", "avx512_bf16", "amx_fp16", "avx512_fp16", "bf16")
"""Flags of /proc/cpuinfo; the last one is ARM's."""


def cpu_model() -> str:
    """Return the processor's name as Linux reports it."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1].strip() if found else platform.processor() or platform.machine()


def cpu_half_precision() -> str:
    """Return the processor's instructions for bfloat16 and float16, `none` where it has none."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = {
        flag
        for line in re.findall(r"^(?:flags|Features)\s*:(.*)", text, re.M)
        for flag in line.split()
    }
    return ", ".join(name for name in HALF_PRECISION if name in flags) or "none"


def device_name(device: str) -> str | None:
    """Return the device's name as in the `device` column of records; None without a driver.

    Args:
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        return cpu_model()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = (
            pynvml.nvmlDeviceGetHandleByUUID(visible)
            if visible.startswith(("GPU-", "MIG-"))
            else pynvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        )
        name = pynvml.nvmlDeviceGetName(handle)
    except Exception:  # no driver, no library, no permission
        return None
    return name.decode() if isinstance(name, bytes) else str(name)
