"""USP: Ulysses within rows of a mesh, ring attention over its columns."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.techniques.sequence_parallel.ring import Ring
from vitsweep.techniques.sequence_parallel.ulysses import heads_conflicts

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Usp(Ring):
    """Unified sequence parallelism (Fang and Zhao, arXiv:2405.07719, algorithm 1).

    `mesh.ulysses` x `mesh.ring`; Ulysses lies on adjacent ranks. Left at auto, Ulysses takes what
    divides the heads and stays within a node, with two ranks at least left to the ring where there
    are four.
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses", "ring")

    @staticmethod
    def default_degrees(ranks: int, tree: dict[str, Any]) -> dict[str, int]:
        """Split `ranks` into Ulysses and ring."""
        heads = int(tree["model"].get("num_heads", 1))  # a model without heads is refused later
        most = min(int(tree["resources"]["ranks_per_node"]), ranks if ranks < 4 else ranks // 2)
        ulysses = max(d for d in range(1, most + 1) if ranks % d == 0 and heads % d == 0)
        return {"ulysses": ulysses, "ring": ranks // ulysses}

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Reasons of Ulysses and of the ring."""
        yield from heads_conflicts(cell, self.name)
        yield from super().conflicts(cell)
