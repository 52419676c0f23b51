"""Names of this machine's processor and accelerator, without loading torch."""

import os
import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """Return the processor's name as Linux reports it."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1].strip() if found else platform.processor() or platform.machine()


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
