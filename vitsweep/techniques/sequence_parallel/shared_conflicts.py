"""Reasons for refusing a cell that several sequence-parallel methods share."""

from collections.abc import Iterator

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.rules import largest_degree


def heads_conflicts(cell: "CellSpec", name: str) -> Iterator[str]:
    """Refuse a Ulysses degree that does not divide the heads."""
    heads, tensor, ways = cell.transformer.num_heads, cell.mesh.tensor, cell.mesh.ulysses
    if heads % tensor:
        return  # tensor parallelism says so itself
    local = heads // tensor
    if local % ways:
        fits = largest_degree(cell, ways, lambda d: local % d == 0)
        after = f" / `mesh.tensor={tensor}`" if tensor > 1 else ""
        yield (
            f"`mesh.ulysses={ways}` must divide `model.num_heads={heads}`{after}: "
            f"`sequence_parallel={name}` gives whole heads to each rank. Try `mesh.ulysses={fits}`, "
            "or `sequence_parallel=ring`, which has no such limit."
        )


def kernel_conflicts(cell: "CellSpec", name: str) -> Iterator[str]:
    """Refuse kernels that do not return the logsumexp by which a ring merges blocks."""
    if not cell.attention.ring_computes_the_same:
        yield (
            f"`sequence_parallel={name}` merges blocks by the logsumexp of their scores, which "
            f"`attention={cell.attention.name}` does not give: use `attention=sdpa_auto` or `sdpa_flash`, "
            "or `sequence_parallel=ulysses`, which runs any kernel."
        )


def order_conflicts(cell: "CellSpec", name: str, order: str) -> Iterator[str]:
    """Refuse zigzag order without a causal mask: the work is balanced already."""
    if order == "zigzag" and not cell.attention.attention_pattern.causal:
        yield (
            f"`sequence_parallel.order=zigzag` balances the work under a causal mask, but "
            f"`attention={cell.attention.name}` has none: use `sequence_parallel.order=contiguous` "
            f"with `sequence_parallel={name}`, or `attention=sdpa_causal`."
        )
