"""What the machine offers on which a sweep is made: the source of every `auto`."""

import os
from dataclasses import dataclass
from functools import cache

from vitsweep.spec.resources import Device

HERE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts of a node.

    Attributes:
        device: `cuda` where GPUs are usable.
        cores_per_node: cores this process may use.
        devices_per_node: usable GPUs.
        described_by: where the facts come from (`this machine`, or the name of a site profile).
        gib_per_device: memory of one GPU that tensors may take, where it is known without looking at it.
    """

    device: Device
    cores_per_node: int
    devices_per_node: int
    described_by: str = HERE
    gib_per_device: float | None = None

    @classmethod
    def here(cls) -> "Machine":
        """Look at this machine, without loading torch (a login node plans thousands of cells)."""
        gpus = count_gpus()
        return cls(
            device="cuda" if gpus else "cpu",
            cores_per_node=len(os.sched_getaffinity(0)),
            devices_per_node=gpus,
        )


def count_gpus() -> int:
    """Count the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml

        pynvml.nvmlInit()
        present = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except Exception:  # no driver, no library, no permission: all mean that no GPU can be used
        return 0
    if visible is None:
        return present
    return min(
        present, len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    )


@cache
def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's newest GPU; None without one.

    Without loading torch. NVML and CUDA may number the GPUs of a mixed machine in other orders, so that a
    rank on its older GPU hears of it from torch.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        found = [pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except Exception:  # no driver, no library, no permission: nothing is known
        return None
    return max(((int(major), int(minor)) for major, minor in found), default=None)
