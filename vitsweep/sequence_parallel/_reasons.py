"""Reasons that several methods share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


def heads_reasons(cell: "CellSpec", name: str) -> Iterator[str]:
    """Ulysses gives whole heads to each rank."""
    heads, tensor, ways = cell.model.num_heads, cell.mesh.tensor, cell.mesh.ulysses
    if heads % tensor:
        return  # tensor parallelism says so itself
    local = heads // tensor
    if local % ways:
        fits = max(d for d in range(1, ways + 1) if local % d == 0)
        after = f" / `mesh.tensor={tensor}`" if tensor > 1 else ""
        yield (
            f"`mesh.ulysses={ways}` must divide `model.num_heads={heads}`{after}: "
            f"`sequence_parallel={name}` gives whole heads to each rank. Try `mesh.ulysses={fits}`, "
            "or `sequence_parallel=ring`, which has no such limit."
        )
