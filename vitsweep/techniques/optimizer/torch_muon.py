"""torch's Muon and AdamW behind one optimizer: what the proof compares `MuonWithAdamW` with (needs torch)."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vitsweep.techniques.optimizer.muon_with_adamw import FUSED_QKV, split_groups


class TorchMuonWithAdamW(Optimizer):
    """`MuonWithAdamW` over whole parameters, by `torch.optim.Muon`, which works on views of them.

    Args:
        groups: parameter groups, as `MuonWithAdamW` takes them.
        learning_rate: of both.
        momentum: decay of the velocity of matrices.
        nesterov: look ahead.
        iterations: of Newton-Schulz.
        adamw: more arguments of torch.optim.AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        *,
        momentum: float,
        nesterov: bool,
        iterations: int,
        adamw: dict[str, Any],
    ) -> None:
        of_muon = [*split_groups(groups, hidden=True)]
        of_adamw = [*split_groups(groups, hidden=False)]
        super().__init__([*of_muon, *of_adamw], {"lr": learning_rate})
        # AdamW shares groups and state with this optimizer.
        self._adamw = torch.optim.AdamW(of_adamw, lr=learning_rate, **adamw)
        self._adamw.state = self.state
        self._of_muon = of_muon
        self._matrices = [
            [_matrices(n, p) for n, p in zip(group["names"], group["params"], strict=True)]
            for group in of_muon
        ]
        self._muon = torch.optim.Muon(
            [{"params": [m for ms in each for m in ms]} for each in self._matrices],
            adjust_lr_fn="match_rms_adamw",
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=iterations,
        )

    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = closure() if closure else None
        for group, inner, matrices in zip(
            self._of_muon, self._muon.param_groups, self._matrices, strict=True
        ):
            inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
            for parameter, views in zip(group["params"], matrices, strict=True):
                self._hand_over(parameter, views)
        self._muon.step()
        for each in self._matrices:
            for views in each:
                for view in views:
                    view.grad = None
        self._adamw.step()
        return loss

    def _hand_over(self, parameter: nn.Parameter, views: list[nn.Parameter]) -> None:
        """Give the views of a matrix their parts of its gradient and momentum."""
        if parameter.grad is None:
            return
        if parameter not in self.state:
            momentum = torch.zeros_like(parameter.grad)
            self.state[parameter]["momentum_buffer"] = momentum
            for view, part in zip(views, momentum.chunk(len(views)), strict=True):
                self._muon.state[view]["momentum_buffer"] = part
        for view, part in zip(views, parameter.grad.chunk(len(views)), strict=True):
            view.grad = part


def _matrices(name: str, parameter: nn.Parameter) -> list[nn.Parameter]:
    parts = parameter.detach().chunk(3 if name.endswith(FUSED_QKV) else 1)
    return [nn.Parameter(part) for part in parts]
