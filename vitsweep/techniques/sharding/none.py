"""No data parallelism: one replica."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan, Sharding

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Unsharded(Sharding):
    """The bare module, for one replica."""

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Return the model as it is."""
        return model

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse several replicas: nothing would average their gradients."""
        if cell.mesh.gradient_shares > 1:
            yield (
                f"`sharding={self.name}` leaves {cell.mesh.gradient_shares} ranks that never "
                "exchange gradients: use `sharding=ddp`, or `resources.ranks_per_node=1`."
            )
