"""Lion (Chen et al., arXiv:2302.06675): the sign of a momentum."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerChoice):
    """Updates by sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g (algorithm 2).

    One moment instead of AdamW's two: half the optimizer state. The paper takes a learning rate 3 to
    10 times lower than AdamW's, and as much more weight decay.

    Attributes:
        beta1: share of the momentum in the update.
        beta2: decay of the momentum.
        implementation: `loop` updates one parameter after the other, `foreach` lists of parameters
            with one call per operation.
    """

    beta1: Annotated[float, Ge(0), Lt(1)]
    beta2: Annotated[float, Ge(0), Lt(1)]
    implementation: Literal["loop", "foreach"]

    elementwise: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return the optimizer; each group carries its own `weight_decay`."""
        from vitsweep.techniques.optimizer.lion_update import LionOptimizer

        return LionOptimizer(
            groups,
            self.learning_rate,
            (self.beta1, self.beta2),
            foreach=self.implementation == "foreach",
        )

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Accept every combination: the update is element by element."""
        return iter(())

    def plain(self) -> "Lion":
        """Return the loop over parameters."""
        return replace(self, implementation="loop")
