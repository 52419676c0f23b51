"""A loss of the user's: any function of outputs and batch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from vitsweep.objectives.classification import Classification
from vitsweep.spec.from_yaml import title_of, wrong_function
from vitsweep.spec.model_spec import needs_equal_parts

if TYPE_CHECKING:
    from vitsweep.objectives.base import OpenObjective
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class ModuleObjective(Classification):
    """A function of the user's in place of the cross entropy; a training is still scored by its accuracy.

    Attributes:
        target: path of a function (outputs, batch) -> mean loss of a micro-batch, a tensor (); outputs are
            float32 or wider, the batch is a pair of images and labels or the mapping that the data give.
        count: path of a function (batch) -> over how many values of a micro-batch `target` is a sum, where
            these may differ, as pixels with a label do. The loss of a step is then the sum over all
            micro-batches of all replicas, divided by their count.
    """

    reads_labels: ClassVar[bool] = False

    target: str | None
    count: str | None = field(metadata={"identity": "where set"})

    @property
    def is_default(self) -> bool:
        """False, also where it is called so."""
        return False

    @property
    def title(self) -> str:
        """The name in tables: `module` by the function that it names."""
        return title_of(self.name, self.target)

    @property
    def code_modules(self) -> tuple[str, ...]:
        """Modules of the two functions."""
        return tuple(path.rpartition(".")[0] for path in (self.target, self.count) if path)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what cannot be imported, and what knows no loss but the cross entropy."""
        yield from super().conflicts(cell)
        if self.target is None:
            yield (
                f"`objective={self.name}` needs `objective.target=package.module.function`, a function of "
                "(outputs, batch) that returns the mean loss."
            )
            return
        yield from wrong_function("objective.target", self.target, "outputs and batch")
        yield from wrong_function("objective.count", self.count, "a batch")

    def _cut_into_parts(self, cell: "CellSpec") -> Iterator[str]:
        yield from needs_equal_parts(cell, "objective.target")

    def open(self, cell: "CellSpec") -> "OpenObjective":
        """Return the function with its count."""
        from vitsweep.objectives.cross_entropy import OwnLoss

        return OwnLoss.named_by(cell)
