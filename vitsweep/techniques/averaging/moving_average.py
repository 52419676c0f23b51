"""Exponential moving average of many tensors in few calls (needs torch)."""

from typing import Any

import torch
from torch import Tensor


class MovingAverage:
    """average <- decay x average + (1 - decay) x weights.

    Args:
        weights: to be averaged, or shards of them; they keep their memory.
        decay: of the average in each update.
        warmup: use (1 + t) / (10 + t) in update t as long as it is less than `decay`.
        every: optimizer steps between updates.

    Attributes:
        averages: one of each weight, in float32 or better.
    """

    def __init__(self, weights: list[Tensor], decay: float, *, warmup: bool, every: int) -> None:
        self._decay, self._warmup, self._every = decay, warmup, every
        self._weights = [_local(weight.detach()) for weight in weights]
        self.averages = [_wide(weight) for weight in self._weights]
        pairs = list(zip(self.averages, self._weights, strict=True))
        self._kept: list[Tensor] = []
        self._alike = _columns([pair for pair in pairs if pair[0].dtype == pair[1].dtype])
        self._narrow = _columns([pair for pair in pairs if pair[0].dtype != pair[1].dtype])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Let the weights after optimizer step `step`, counted from 0, enter the average."""
        if (step + 1) % self._every:
            return
        number = step // self._every
        decay = min(self._decay, (1 + number) / (10 + number)) if self._warmup else self._decay
        averages, weights = self._alike
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)
        averages, weights = self._narrow
        if averages:
            torch._foreach_mul_(averages, decay)
            torch._foreach_add_(averages, weights, alpha=1 - decay)

    @torch.no_grad()
    def enter(self) -> None:
        """Put the averages into the weights, rounded where these are below float32."""
        self._kept = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self.averages)

    @torch.no_grad()
    def leave(self) -> None:
        """Put the weights back that were there before `enter`."""
        torch._foreach_copy_(self._weights, self._kept)
        self._kept = []


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [average for average, _ in pairs], [weight for _, weight in pairs]


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
