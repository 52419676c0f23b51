"""Flat buffers: parameters and gradients of a group become views of two long vectors."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitsweep.collectives.primitives import aligned, view_like


class FlatBuffer:
    """One flat parameter and its gradient; the originals become views of both.

    A parameter that takes no part in a step has a zero gradient here, where other optimizers skip
    it: it still decays.

    Attributes:
        parameter: the flat parameter, for the optimizer; padding stays zero.
        originals: the model's parameters, all of one dtype on one device.
        names: of the originals, in the reference model.
    """

    def __init__(self, originals: list[nn.Parameter], names: list[str]) -> None:
        self.originals, self.names = originals, names
        sizes = [aligned(original.numel(), original.element_size()) for original in originals]
        self.parameter = nn.Parameter(originals[0].detach().new_zeros(sum(sizes)))
        self.parameter.grad = torch.zeros_like(self.parameter)
        self._starts = list(accumulate(sizes, initial=0))[:-1]
        buffers = self.parameter.detach(), self.parameter.grad
        for original, start in zip(originals, self._starts, strict=True):
            view, gradient = (view_like(buffer, original, start) for buffer in buffers)
            view.copy_(original.detach())
            if original.grad is not None:
                gradient.copy_(original.grad)
            original.data, original.grad = view, gradient
        self._addresses = self._current_addresses()

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the part of a buffer of this length that belongs to each original, in its shape."""
        pairs = zip(self.originals, self._starts, strict=True)
        return [view_like(buffer, original, start) for original, start in pairs]

    def check(self) -> None:
        """Make sure that the model still works on this buffer (0.1 ms for 200 parameters).

        Raises:
            RuntimeError: a parameter or gradient was replaced, so that updates would be lost.
        """
        if self._current_addresses() != self._addresses:
            raise RuntimeError(
                "A parameter or gradient no longer lies in the flat buffer of the contiguous "
                "optimizer. Something replaced `.data` or `.grad` after the optimizer was built: "
                "`model.zero_grad()` or `.grad = None` (write into `.grad`, or call the "
                "optimizer's `zero_grad`), `.to()`, or DDP with `gradient_as_bucket_view=True`."
            )

    def _current_addresses(self) -> list[int]:
        pairs = ((p, p.grad) for p in self.originals)
        return [0 if t is None else t.data_ptr() for pair in pairs for t in pair]


class _OnFlatBuffers(Optimizer):
    """An optimizer whose parameters are flat buffers: one per group, dtype and device."""

    buffers: list[FlatBuffer]

    def __init__(self, groups: list[dict[str, Any]], **arguments: Any) -> None:
        self.buffers = []
        super().__init__([self._flatten(group) for group in groups], **arguments)
        self.register_step_pre_hook(lambda *_: self.check())

    def _flatten(self, group: dict[str, Any]) -> dict[str, Any]:
        names = group.get("names") or map(str, range(len(group["params"])))
        alike: dict[Any, tuple[list[nn.Parameter], list[str]]] = {}
        for parameter, name in zip(group["params"], names, strict=True):
            parameters, named = alike.setdefault((parameter.dtype, parameter.device), ([], []))
            parameters.append(parameter)
            named.append(name)
        buffers = [FlatBuffer(*of_one_kind) for of_one_kind in alike.values()]
        self.buffers += buffers
        return group | {"params": [buffer.parameter for buffer in buffers]}

    def check(self) -> None:
        """Make sure that no parameter or gradient left its buffer; before every step."""
        for buffer in self.buffers:
            buffer.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill the gradient buffers with zeros; they are kept, whatever `set_to_none` says."""
        for buffer in self.buffers:
            assert buffer.parameter.grad is not None
            buffer.parameter.grad.zero_()


class FlatAdamW(_OnFlatBuffers, torch.optim.AdamW):
    """torch's AdamW over flat buffers."""


class FlatSGD(_OnFlatBuffers, torch.optim.SGD):
    """torch's SGD over flat buffers."""
