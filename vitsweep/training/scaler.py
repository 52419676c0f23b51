"""Loss scaling with one decision about overflow for all ranks."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class LossScaler:
    """torch's GradScaler, dynamic or constant, agreeing on found_inf across ranks.

    Where ranks hold different gradients (pipeline stages, tensor shards, ZeRO shards) an overflow
    on one would make it skip a step that the others take. FSDP2's DTensors agree by themselves; the
    flag is max-reduced for all others. apex caps its scale at 2**24; torch does not.

    Args:
        loss_scale: "dynamic" (2**16 at first, x2 after 2000 good steps, /2 after an overflow) or a
            constant.
        device_type: `cpu` or `cuda`.
    """

    def __init__(self, loss_scale: float | Literal["dynamic"], device_type: str) -> None:
        self._constant = None if loss_scale == "dynamic" else float(loss_scale)
        self._scaler = GradScaler(device_type, init_scale=self._constant or 2.0**16)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> Tensor:
        """Divide the gradients by the scale; return 1 where any rank found inf or NaN, else 0."""
        self._scaler.unscale_(optimizer)
        state = self._scaler._per_optimizer_states[id(optimizer)]
        flags = list(state["found_inf_per_device"].values())
        if dist.is_initialized() and dist.get_world_size() > 1:
            for flag in flags:
                local = flag.to_local() if isinstance(flag, DTensor) else flag
                dist.all_reduce(local, dist.ReduceOp.MAX)
        return torch.stack([f.full_tensor() if isinstance(f, DTensor) else f for f in flags]).amax()

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters unless an overflow was found, then adapt the scale."""
        self._scaler.step(optimizer)
        self._scaler.update(self._constant)

    def state(self) -> dict[str, float]:
        """Return scale and count of good steps, for a later `restore`; reading waits for the device."""
        return dict(self._scaler.state_dict())

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` returned."""
        self._scaler.load_state_dict(state)

    @property
    def current(self) -> float:
        """The scale; reading it waits for the device."""
        return self._scaler.get_scale()
