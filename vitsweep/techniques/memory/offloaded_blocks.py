"""Blocks whose saved activations wait on the host (needs torch; imported when applied)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Packed = tuple[torch.device, Tensor]


class OffloadedBlock(nn.Module):
    """A block that saves its activations on the host; its parameters stay where they are."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Transform the inputs."""
        with saved_tensors_hooks(_to_host, _to_device):
            return super().forward(*inputs, **named)


def _to_host(tensor: Tensor) -> Packed:
    if _comes_from_parameter(tensor):
        return tensor.device, tensor
    # Pinned memory lets the copy run while the host goes on; torch caches it between steps.
    host = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(packed: Packed) -> Tensor:
    # Same stream as the copy out, so that the order of the two is given.
    device, tensor = packed
    return tensor.to(device, non_blocking=True)


def _comes_from_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, or a view or a cast of one (as under autocast).

    Its history is then a chain of functions of one input, down to where gradients accumulate.
    """
    function = tensor.grad_fn
    if function is None:
        return isinstance(tensor, nn.Parameter)
    while function is not None and len(function.next_functions) == 1:
        function = function.next_functions[0][0]
    return function is not None and function.name() == "torch::autograd::AccumulateGrad"
