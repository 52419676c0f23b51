"""torchao's AdamW update on compact state (needs torch and torchao)."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from vitsweep.collectives.primitives import local

QUANTIZED = {"int8": (OptimState8bit, 256), "int4": (OptimState4bit, 128)}
LEAST_NUMBERS = 4096
"""Smaller tensors are not quantized (as in bitsandbytes and torchao)."""


class CompactUpdate(Optimizer):
    """AdamW in float32 over moments that are stored in fewer bits.

    torchao's own optimizers wrap the same function; they compile it in any case, and take no learning
    rate that a schedule sets as a number.

    Args:
        groups: parameter groups with `weight_decay`.
        learning_rate: of all groups.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        state: `int8`, `int4` or `bfloat16`.
        stochastic_rounding: of bfloat16 weights.
        compiled: compile the update, once for each shape.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        *,
        state: str,
        stochastic_rounding: bool,
        compiled: bool,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": eps})
        self._format, self._round = state, stochastic_rounding
        self._update: Any = single_param_adam
        if compiled:
            self._update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = closure() if closure else None
        # One compilation per shape, of which a model has few: no limit on their number.
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                # A tensor: torch.compile would compile anew for another number.
                rate = torch.tensor(float(group["lr"]), dtype=torch.float32)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, group, rate)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any], rate: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = self._zeros(parameter, signed=True)
            state["exp_avg_sq"] = self._zeros(parameter, signed=False)
        state["step"] += 1
        # Element by element within blocks: a shard is updated where it is.
        self._update(
            local(parameter.detach()),
            local(parameter.grad),
            state["step"],
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            None,
            rate.to(parameter.device, non_blocking=True),
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            True,
            self._round,
        )

    def _zeros(self, parameter: Tensor, *, signed: bool) -> Tensor:
        """Return a moment for what this rank holds of a parameter."""
        own = local(parameter.detach())
        if self._format == "bfloat16":
            zeros = torch.zeros_like(own, dtype=torch.bfloat16)
        else:
            kind, block = QUANTIZED[self._format]
            if own.numel() < LEAST_NUMBERS or own.numel() % block:
                # float16 holds no small square
                wide = torch.promote_types(own.dtype, torch.float32)
                zeros = torch.zeros_like(own, dtype=wide)
            else:
                zeros = kind.zeros(own.shape, signed, block, own.device, dtype=own.dtype)
        if not isinstance(parameter, DTensor):
            return zeros
        return DTensor.from_local(
            zeros,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
