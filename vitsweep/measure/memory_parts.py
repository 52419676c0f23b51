"""What fills the memory of a rank: parameters, gradients, optimizer state, activations."""

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

from vitsweep.measure.memory_peak import GIB

KEPT = ("Activation", "Temp")
"""Kinds of torch's tracker: made in a forward pass, made in a backward pass."""


class TensorTracker(MemTracker):
    """torch's tracker of tensors by kind, without its statistics of modules.

    These refuse a model that runs several times in a step: micro-batches, pipelines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: WeakSet[torch.nn.Module] = WeakSet()

    def peak_bytes(self, device: torch.device) -> dict[str, int]:
        """Return kind -> bytes at the moment when they were most together."""
        kinds = self.get_tracker_snapshot("peak").get(device, {})
        return {str(getattr(kind, "value", kind)): size for kind, size in kinds.items()}

    def _pre_fw_hook(self, module: torch.nn.Module, inputs: Any) -> None:
        if module not in self._seen:  # what is gathered now is a parameter, no activation
            self._seen.add(module)
            self._track_module_params_and_buffers(module)

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: Any, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: Any, args: Any) -> None:
        pass


def step_in_parts(trainer: Any, stream: Iterator[Any]) -> dict[str, float | None]:
    """Train for one step and return the parts of this rank's memory, in GiB.

    Parameters, gradients (as they are before the update) and optimizer state, float32 masters
    included, are the sizes of the tensors that this rank holds. Gathered parameters and activations
    are what else is alive at the peak of forward and backward, by torch's tracker of tensors; it
    sees nothing inside compiled code, so that they are empty there.

    Args:
        trainer: that has taken a step before, so that its optimizer has a state.
        stream: of micro-batches.
    """
    tracker = TensorTracker() if trainer.cell.compilation.scope == "nothing" else None
    if tracker is None:
        trainer.gradients(stream)
    else:
        tracker.track_external(trainer.model)
        with tracker:
            trainer.gradients(stream)
    parameters = list(trainer.model.parameters())
    parts: dict[str, float | None] = {
        "parameter_gib": _gib(parameters),
        "gradient_gib": _gib(p.grad for p in parameters if p.grad is not None),
        "optimizer_state_gib": _gib(_state(trainer, parameters)),
        "gathered_parameter_gib": None,
        "activation_gib": None,
    }
    if tracker:
        peak = tracker.peak_bytes(trainer.world.device)
        held = sum(_local(p).nbytes for p in parameters)
        parts["gathered_parameter_gib"] = max(0, peak["Parameter"] - held) / GIB
        parts["activation_gib"] = sum(peak[kind] for kind in KEPT) / GIB
    trainer.update()
    return parts


def _state(trainer: Any, parameters: list[Tensor]) -> Iterator[Tensor]:
    """Yield what the optimizer holds on this rank beside the model's own parameters."""
    optimizer = getattr(trainer.optimizer, "optim", trainer.optimizer)  # ZeRO-1 has a local one
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    if trainer.masters:
        models = {id(p) for p in parameters}
        for group in optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in models)


def _gib(tensors: Iterable[Tensor]) -> float:
    return sum(_local(t).nbytes for t in tensors) / GIB


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
