"""Names of this machine's processor and accelerator, without loading torch.

Kernels ask the processor which instructions it has, and the environment may take some away:
`ONEDNN_MAX_CPU_ISA` from oneDNN (products, convolutions), `ATEN_CPU_CAPABILITY` from PyTorch's own
kernels. Such a processor is another device: its rates are others.
"""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
HALF_PRECISION = ("amx_bf16", "avx512_bf16", "amx_fp16", "avx512_fp16", "bf16")
"""Flags of /proc/cpuinfo; the last one is ARM's."""
ONEDNN = {
    "SSE41": "sse4_1", "AVX": "avx", "AVX2": "avx2", "AVX2_VNNI": "avx_vnni",
    "AVX2_VNNI_2": "avx_ne_convert", "AVX512_CORE": "avx512bw", "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE_BF16": "avx512_bf16", "AVX512_CORE_FP16": "avx512_fp16",
    "AVX512_CORE_AMX": "amx_bf16", "AVX512_CORE_AMX_FP16": "amx_fp16",
}  # fmt: skip
ATEN = {"default": "sse4_1", "avx2": "avx2", "avx512": "avx512bw"}
"""Value of the variable -> flag of a processor that has these instructions; each includes those before it."""
LIMITED_TO = ", limited to "
LIMITS = {"oneDNN": ("ONEDNN_MAX_CPU_ISA", ONEDNN), "ATen": ("ATEN_CPU_CAPABILITY", ATEN)}


def cpu_model() -> str:
    """Return the processor's name as Linux reports it."""
    found = re.search(r"model name\s*:\s*(.+)", CPUINFO.read_text(encoding="utf-8"))
    return found[1].strip() if found else platform.processor() or platform.machine()


def cpu_half_precision() -> str:
    """Return the instructions for bfloat16 and float16 that oneDNN may use, `none` where there are none."""
    usable = _flags() - {*_above_limit("ONEDNN_MAX_CPU_ISA", ONEDNN)}
    return ", ".join(name for name in HALF_PRECISION if name in usable) or "none"


def cpu_limits() -> str:
    """Return the end of a processor's name where the environment takes instructions away, else ""."""
    limits = [
        f"{max((n for n in levels if levels[n] in _flags() - above), key=[*levels].index)} ({library})"
        for library, (variable, levels) in LIMITS.items()
        if (above := {*_above_limit(variable, levels)})
    ]
    return f"{LIMITED_TO}{' and '.join(limits)}" if limits else ""


def device_name(device: str) -> str | None:
    """Return the device's name as in the `device` column of records; None without a driver.

    A processor's name says which instructions are used where the environment takes some away.

    Args:
        device: `cpu` or `cuda`.
    """
    if device == "cpu":
        return cpu_model() + cpu_limits()
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


def _flags() -> set[str]:
    text = CPUINFO.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)", text, re.M)
    return {flag for line in lines for flag in line.split()}


def _above_limit(variable: str, levels: Mapping[str, str]) -> list[str]:
    """Return the flags that this processor has and the environment takes away."""
    limit, flags = os.environ.get(variable, ""), _flags()
    known = {name.lower(): place for place, name in enumerate(levels)}
    above = [*levels.values()][known.get(limit.lower(), len(levels)) + 1 :]
    return [flag for flag in above if flag in flags]
