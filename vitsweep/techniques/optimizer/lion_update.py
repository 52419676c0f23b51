"""The update of Lion, by a loop or over lists of tensors (needs torch)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LionOptimizer(Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2).

    Args:
        groups: parameter groups with `weight_decay`.
        learning_rate: of all groups.
        betas: share of the momentum in the update, and its decay.
        foreach: one call per operation for a list of parameters instead of one per parameter.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        *,
        foreach: bool,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas})
        self._update = _update_lists if foreach else _update_one_by_one

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if parameter not in self.state:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            gradients = [p.grad for p in parameters]
            momenta = [self.state[p]["momentum"] for p in parameters]
            if parameters:
                numbers = group["lr"], group["betas"], group["weight_decay"]
                self._update(parameters, gradients, momenta, *numbers)
        return loss


def _update_one_by_one(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    rate: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    for weight, gradient, momentum in zip(weights, gradients, momenta, strict=True):
        direction = (betas[0] * momentum + (1 - betas[0]) * gradient).sign()
        weight.mul_(1 - rate * decay).add_(direction, alpha=-rate)
        momentum.mul_(betas[1]).add_(gradient, alpha=1 - betas[1])


def _update_lists(
    weights: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    rate: float,
    betas: tuple[float, float],
    decay: float,
) -> None:
    directions = torch._foreach_mul(momenta, betas[0])
    torch._foreach_add_(directions, gradients, alpha=1 - betas[0])
    torch._foreach_sign_(directions)
    if decay:
        torch._foreach_mul_(weights, 1 - rate * decay)
    torch._foreach_add_(weights, directions, alpha=-rate)
    torch._foreach_mul_(momenta, betas[1])
    torch._foreach_add_(momenta, gradients, alpha=1 - betas[1])
