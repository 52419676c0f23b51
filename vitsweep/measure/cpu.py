"""The processor of this machine."""

import platform
import re
from pathlib import Path


def cpu_model() -> str:
    """Return the processor's name."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.processor() or platform.machine()
