"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) in the implementations that PyTorch has."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice

if TYPE_CHECKING:
    from torch.optim import Optimizer

FLOAT16_TINIEST = 2.0**-24
"""Smallest positive float16 (subnormal)."""


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerChoice):
    """Adam with decoupled weight decay.

    Attributes:
        beta1: decay of the mean gradient.
        beta2: decay of the mean squared gradient.
        eps: added to the root of the latter.
        implementation: `loop` updates one parameter after the other, `foreach` lists of parameters
            with one kernel per operation (multi-tensor apply), `fused` lists with one kernel.
    """

    beta1: Annotated[float, Ge(0), Lt(1)]
    beta2: Annotated[float, Ge(0), Lt(1)]
    eps: Annotated[float, Gt(0)]
    implementation: Literal["loop", "foreach", "fused"]

    elementwise: ClassVar[bool] = True

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return torch's AdamW; each group carries its own `weight_decay`."""
        import torch

        return torch.optim.AdamW(groups, **self.arguments())

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse an `eps` that rounds to zero in float16: the update would divide by zero."""
        plan = cell.precision.plan()
        if plan.param_dtype == "float16" and not plan.master_weights and self.eps < FLOAT16_TINIEST:
            yield (
                f"`optimizer.eps={self.eps:g}` is zero in float16 (`precision={cell.precision.name}` "
                "without master weights), so that AdamW would divide by zero: use "
                "`optimizer.eps=auto`, or `precision=O2`."
            )

    def plain(self) -> "AdamW":
        """Return the loop over parameters."""
        knobs = {field.name: getattr(self, field.name) for field in fields(AdamW)}
        return AdamW(**knobs | {"implementation": "loop"})

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of torch's AdamW."""
        return {
            "lr": self.learning_rate,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "foreach": self.implementation == "foreach",
            "fused": self.implementation == "fused",
        }
