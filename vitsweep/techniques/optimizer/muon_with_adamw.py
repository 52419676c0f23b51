"""torch's Muon and AdamW behind one optimizer (needs torch)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

FUSED_QKV = (".qkv.weight", ".in_proj_weight")
"""Names of matrices (3 D, D) that are q, k and v, one below the other."""


class MuonWithAdamW(Optimizer):
    """Muon over the matrices of the blocks, AdamW over the other parameters.

    Groups and state are by the model's own parameters, so that clipping, schedules and checkpoints
    treat it like any other optimizer; Muon itself works on views of them.

    Args:
        groups: parameter groups with `names`, the reference model's, which of them lie `in_blocks`, and
            `weight_decay`.
        learning_rate: of both.
        muon: more arguments of torch.optim.Muon.
        adamw: more arguments of torch.optim.AdamW.

    Attributes:
        matrix_names: of the matrices that Muon updates.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        muon: dict[str, Any],
        adamw: dict[str, Any],
    ) -> None:
        of_muon = list(_parts(groups, hidden=True))
        of_adamw = list(_parts(groups, hidden=False))
        super().__init__([*of_muon, *of_adamw], {"lr": learning_rate})
        # AdamW shares groups and state with this optimizer.
        self._adamw = torch.optim.AdamW(of_adamw, lr=learning_rate, **adamw)
        self._adamw.state = self.state
        self._of_muon = of_muon
        self.matrix_names = [name for group in of_muon for name in group["names"]]
        self._matrices = [
            [_matrices(n, p) for n, p in zip(group["names"], group["params"], strict=True)]
            for group in of_muon
        ]
        self._muon = torch.optim.Muon(
            [{"params": [m for ms in each for m in ms]} for each in self._matrices],
            adjust_lr_fn="match_rms_adamw",
            **muon,
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


def _parts(groups: list[dict[str, Any]], *, hidden: bool) -> Iterator[dict[str, Any]]:
    """Yield each group's parameters that are matrices of blocks, or those that are not."""
    for group in groups:
        in_blocks = {name for name in group["in_blocks"] if name.endswith("weight")}
        named = zip(group["names"], group["params"], strict=True)
        chosen = [(n, p) for n, p in named if (n in in_blocks and p.ndim == 2) is hidden]
        if chosen:
            names, parameters = zip(*chosen, strict=True)
            yield group | {"params": list(parameters), "names": list(names)}


def _matrices(name: str, parameter: nn.Parameter) -> list[nn.Parameter]:
    parts = parameter.detach().chunk(3 if name.endswith(FUSED_QKV) else 1)
    return [nn.Parameter(part) for part in parts]
