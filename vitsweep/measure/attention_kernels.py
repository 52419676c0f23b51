"""Which attention kernel really runs, whichever was asked for."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from vitsweep.measure.communication import observing

KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (cpu)",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "of the device",
    "flex_attention": "flex",
}
"""Operation that torch dispatches -> kernel."""
SOFTMAX = ("_softmax", "_safe_softmax")
"""Without a fused kernel the scores are normalised by one of these."""


class AttentionKernels(AbstractContextManager["AttentionKernels"]):
    """Notes the attention kernels of the operations inside the block."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}
        self._softmax = False
        self._mode: AbstractContextManager[Any] | None = None

    def __enter__(self) -> "AttentionKernels":
        try:
            self._mode = observing(self._note)
            self._mode.__enter__()
        except ImportError:  # this torch has no dispatch modes as they are used here
            self._mode = None
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*raised)

    @property
    def name(self) -> str | None:
        """The kernels, `math` where none was fused, None where no attention was seen."""
        if self._found:
            return ", ".join(self._found)
        return "math" if self._softmax else None

    def _note(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = getattr(func, "_schema", None)
        short = (
            name.name.split("::")[-1] if name is not None else str(getattr(func, "__name__", ""))
        )
        kernel = KERNELS.get(short)
        if kernel == "flash":
            kernel = _flash()
        if kernel:
            self._found[kernel] = None
        elif short in SOFTMAX and args and isinstance(args[0], torch.Tensor) and args[0].ndim > 2:
            self._softmax = True


def _flash() -> str:
    """Return the implementation of flash attention that is registered, such as `flash (FA3)`."""
    try:
        from torch.nn.attention import current_flash_attention_impl
    except ImportError:
        return "flash"
    found = current_flash_attention_impl()
    return f"flash ({found})" if found else "flash"
