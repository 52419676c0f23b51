"""Why the matrices of a block cannot be split over ranks: reasons of two groups."""

from collections.abc import Iterator

from vitsweep.spec.cell_spec import CellSpec


def split_reasons(cell: CellSpec, choice: str) -> Iterator[str]:
    """Yield reasons; `choice` is the technique as typed."""
    ways, heads, hidden = cell.mesh.tensor, cell.transformer.num_heads, cell.transformer.mlp_width
    if heads % ways or hidden % ways:
        fits = max(d for d in range(1, ways + 1) if heads % d == 0 and hidden % d == 0)
        yield (
            f"`mesh.tensor={ways}` must divide `model.num_heads={heads}` and "
            f"`model.mlp_width={hidden}`: `{choice}` gives whole heads and equal parts of the MLP "
            f"to each rank. Try `mesh.tensor={fits}`."
        )
    if cell.precision.float8:
        yield (
            f"`{choice}` splits linears that `precision={cell.precision.name}` has replaced by its "
            "own: use another precision."
        )
