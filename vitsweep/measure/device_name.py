"""The name of the device that cells of this machine run on, without loading torch."""

import os

from vitsweep.measure.cpu import cpu_model


def device_name(device: str) -> str | None:
    """Return the name as the records' `device` column has it; None where the driver does not tell.

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
