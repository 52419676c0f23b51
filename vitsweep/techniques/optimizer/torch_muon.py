"""torch's Muon and AdamW behind one optimizer: what the proof compares `MuonWithAdamW` with (needs torch)."""

from typing import Any

import torch
from torch import nn

from vitsweep.techniques.optimizer.muon_with_adamw import FUSED_QKV, MuonWithAdamW


class TorchMuonWithAdamW(MuonWithAdamW):
    """`MuonWithAdamW` over whole parameters, by `torch.optim.Muon`, which works on views of them."""

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float, **settings: Any) -> None:
        super().__init__(groups, learning_rate, **settings)
        self._views = {
            p: [*map(nn.Parameter, p.detach().chunk(3 if name.endswith(FUSED_QKV) else 1))]
            for group in self._of_muon
            for name, p in zip(group["names"], group["params"], strict=True)
        }
        self._muon = torch.optim.Muon(
            [{"params": [v for p in g["params"] for v in self._views[p]]} for g in self._of_muon],
            adjust_lr_fn="match_rms_adamw",
            momentum=self._momentum,
            nesterov=self._nesterov,
            ns_steps=self._iterations,
        )

    def _update_matrices(self) -> None:
        for group, inner in zip(self._of_muon, self._muon.param_groups, strict=True):
            inner["lr"], inner["weight_decay"] = group["lr"], group["weight_decay"]
        for parameter, views in self._views.items():
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            both = (held.chunk(len(views)) for held in (state["momentum_buffer"], parameter.grad))
            for view, momentum, gradient in zip(views, *both, strict=True):
                self._muon.state[view]["momentum_buffer"], view.grad = momentum, gradient
        self._muon.step()
        for view in [view for views in self._views.values() for view in views]:
            view.grad = None
