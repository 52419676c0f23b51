"""Memory of one rank: its peak, and what fills it (parameters, gradients, optimizer state, activations)."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from vitsweep.collectives.primitives import local

GIB = 2**30
NOT_PARAMETERS = ("Activation", "Temp")
"""Kinds of torch's memory tracker: allocated in a forward pass, allocated in a backward pass."""


def reset_peak(device: torch.device) -> None:
    """Start a new peak, once the model is built."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the weights that were drawn whole, one after the other
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # a kernel that forbids it: the peak then covers the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM (proc(5))


def peak_memory(device: torch.device) -> dict[str, float | None]:
    """Return the peak columns of this rank in GiB: the allocator's on CUDA, the process's on CPU."""
    if device.type == "cuda":
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "peak_rss_gib": None,
        }
    return {"peak_allocated_gib": None, "peak_rss_gib": _peak_rss_gib()}


def _peak_rss_gib() -> float | None:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024 / GIB if found else None


def memory_by_kind(trainer: Any, stream: Iterator[Any]) -> tuple[dict[str, float | None], str]:
    """Train for one step; return this rank's memory by kind in GiB, and why a column is empty.

    Parameters, gradients (before the update) and optimizer state, float32 master weights included,
    are the sizes of the tensors that this rank holds. Gathered parameters and activations are what
    else is alive at the peak of forward and backward, by torch's memory tracker. It sees nothing
    inside compiled code: both are empty there, and where a backward pass is split.

    Args:
        trainer: it must have taken a step before, so that its optimizer has a state.
        stream: micro-batches.

    Returns:
        Column -> GiB, and the reason why `gathered_parameter_gib` and `activation_gib` are empty
        ("" where they are not).
    """
    peak, reason = _gradients_with_peak(trainer, stream)
    parameters = list(trainer.model.parameters())
    columns: dict[str, float | None] = {
        "parameter_gib": _gib(parameters),
        "gradient_gib": _gib(p.grad for p in parameters if p.grad is not None),
        "optimizer_state_gib": _gib(optimizer_tensors(trainer)),
        "gathered_parameter_gib": None,
        "activation_gib": None,
    }
    if peak:
        held = sum(local(p).nbytes for p in parameters)
        columns["gathered_parameter_gib"] = max(0, peak["Parameter"] - held) / GIB
        columns["activation_gib"] = sum(peak[kind] for kind in NOT_PARAMETERS) / GIB
    trainer.update()
    return columns, reason


def _gradients_with_peak(trainer: Any, stream: Iterator[Any]) -> tuple[dict[str, int], str]:
    """Compute the gradients of one step; return kind of tensor -> bytes at the peak.

    The tracker is private to torch: where it is missing or works differently, the gradients are
    computed without it, and the reason says so.
    """
    if trainer.cell.compilation.scope != "nothing":
        trainer.gradients(stream)
        return {}, "torch's memory tracker sees no tensors inside compiled code"
    try:
        tracker = _tensor_tracker()
        tracker.track_external(trainer.model)
        tracker.peak_bytes(trainer.world.device)
    except (ImportError, AttributeError, TypeError) as error:
        trainer.gradients(stream)
        return {}, f"this torch has no memory tracker as it is used here ({error})"
    with tracker:
        trainer.gradients(stream)
    return tracker.peak_bytes(trainer.world.device), ""


def _tensor_tracker() -> Any:
    """Return torch's memory tracker (a private module) without its statistics of modules.

    These refuse a model that runs several times in a step: micro-batches, pipelines.

    Raises:
        ImportError: this torch has no such module.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class TensorTracker(MemTracker):
        def __init__(self) -> None:
            super().__init__()
            self._seen: WeakSet[torch.nn.Module] = WeakSet()
            # its hooks on gradients keep that of every block's tokens until those of the context are there
            modules: Any = self._mod_tracker
            modules._fw_pre_hook = self._pre_fw_hook
            modules._fw_post_hook = lambda *_: None

        def peak_bytes(self, device: torch.device) -> dict[str, int]:
            """Kind of tensor -> bytes at the moment of the largest sum."""
            kinds = self.get_tracker_snapshot("peak").get(device, {})
            return {str(getattr(kind, "value", kind)): size for kind, size in kinds.items()}

        def _pre_fw_hook(self, module: torch.nn.Module, inputs: Any) -> None:
            if module not in self._seen:  # what is gathered now is a parameter, no activation
                self._seen.add(module)
                for frozen in (p for p in module.parameters() if not p.requires_grad):
                    # it takes no hook, and has no gradient to be tracked
                    handles = RemovableHandle(OrderedDict()), RemovableHandle(OrderedDict())
                    self._param_to_grad_hook_handles.setdefault(frozen, handles)
                self._track_module_params_and_buffers(module)

    return TensorTracker()


def optimizer_tensors(trainer: Any) -> Iterator[Tensor]:
    """Yield what the optimizer holds on this rank besides the model's own parameters."""
    for state in trainer.optimizer.state.values():
        for value in state.values():
            yield from _stored(value) if isinstance(value, Tensor) else ()
    if trainer.masters:
        yield from trainer.masters.copies
    if trainer.average:
        yield from trainer.average.averages


def _stored(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what this rank stores of a tensor: its shard, the codes and scales of quantized state."""
    own = local(tensor)
    if not is_traceable_wrapper_subclass(own):
        yield own
        return
    for name in own.__tensor_flatten__()[0]:
        yield from _stored(getattr(own, name))


def _gib(tensors: Iterable[Tensor]) -> float:
    return sum(local(t).nbytes for t in tensors) / GIB
