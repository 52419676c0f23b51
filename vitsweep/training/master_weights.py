"""float32 copies of half-precision parameters, for the optimizer to update (apex O2)."""

from typing import Any

import torch
from torch import Tensor


class MasterWeights:
    """Masters of all parameters below float32; float32 parameters are their own masters.

    Attributes:
        groups: parameter groups over the masters, for the optimizer.
        copies: the masters of parameters below float32.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._model: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.groups = [{**g, "params": [self._master(p) for p in g["params"]]} for g in groups]

    def _master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        master = torch.nn.Parameter(parameter.detach().float())
        self._model.append(parameter)
        self.copies.append(master)
        return master

    def of(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter: itself where it is float32 already."""
        for own, master in zip(self._model, self.copies, strict=True):
            if own is parameter:
                return master
        return parameter

    def take_gradients(self) -> None:
        """Copy the model's gradients to the masters: few kernels for all, in place where buffers are.

        Without buffers of the optimizer's own they are freed again after the update: kept, they
        would add four bytes per parameter to the peak of the backward pass.
        """
        pairs = zip(self._model, self.copies, strict=True)
        used = [(p.grad, master) for p, master in pairs if p.grad is not None]
        for _, master in used:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        if used:
            gradients, masters = zip(*used, strict=True)
            torch._foreach_copy_([m.grad for m in masters], list(gradients))

    def publish(self) -> None:
        """Copy the updated masters back to the model."""
        with torch.no_grad():
            if self._model:
                torch._foreach_copy_(self._model, self.copies)

    def zero_model_gradients(self) -> None:
        """Drop the gradients of the half-precision parameters; the optimizer drops the masters'."""
        for parameter in self._model:
            parameter.grad = None
