"""Stochastic gradient descent with momentum in the implementations that PyTorch has."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerChoice):
    """SGD with momentum; weight decay is added to the gradient (L2), as in PyTorch.

    Attributes:
        momentum: decay of the velocity; 0 keeps none.
        nesterov: look ahead (pycls' default); needs momentum.
        implementation: `loop`, `foreach` or `fused`, as for AdamW.
    """

    momentum: Annotated[float, Ge(0), Lt(1)]
    nesterov: bool
    implementation: Literal["loop", "foreach", "fused"]

    elementwise: ClassVar[bool] = True

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return torch's SGD; each group carries its own `weight_decay`."""
        import torch

        return torch.optim.SGD(groups, **self.arguments())

    def plain(self) -> "SGD":
        """Return the loop over parameters."""
        knobs = {field.name: getattr(self, field.name) for field in fields(SGD)}
        return SGD(**knobs | {"implementation": "loop"})

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of torch's SGD."""
        return {
            "lr": self.learning_rate,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "foreach": self.implementation == "foreach",
            "fused": self.implementation == "fused",
        }

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse Nesterov without momentum, and what torch's fused SGD leaves as it is on a CPU."""
        if self.nesterov and not self.momentum:
            yield "`optimizer.nesterov=true` needs `optimizer.momentum` above 0."
        plan = cell.precision.plan()
        in_half = plan.param_dtype in ("float16", "bfloat16") and not plan.master_weights
        if self.implementation == "fused" and in_half and cell.resources.device == "cpu":
            yield (
                f"`optimizer={self.name}` leaves {plan.param_dtype} parameters as they are on CPU "
                "(found by the equivalence tests on torch 2.13: the kernel updates nothing): use "
                "`optimizer=sgd_foreach`, or a precision with float32 or master weights."
            )
