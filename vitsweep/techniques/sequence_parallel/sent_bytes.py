"""Bytes that each method sends per rank and step: the formulas of this implementation (no torch).

n ranks share tokens; L is a rank's share of the sharded axis, padding included; the other axis of a
multi-dimensional model counts as images. All-gather, reduce-scatter and all-to-all of a tensor of b
bytes (the gathered one) send (n-1)/n b from each rank, a point-to-point message b.
"""

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_parallel import Volume, remote_fraction


def axis_lengths(cell: CellSpec) -> tuple[int, ...]:
    """Tokens along each axis of the model."""
    return cell.transformer.sequence_lengths(cell.batch.resolution_px, cell.classifier.pooling)


def padded_share(length: int, ranks: int, unit: int | None = None) -> int:
    """A rank's share of an axis that is padded to a multiple of `unit` (`ranks` if None)."""
    unit = unit or ranks
    return -(-length // unit) * unit // ranks


def attending_blocks(cell: CellSpec) -> int:
    """Blocks that attend along the first axis, the one that is sharded."""
    return cell.transformer.depth // cell.transformer.num_sequence_axes


def tokens(cell: CellSpec, unit: int | None = None) -> int:
    """Tokens of one image on a rank, sharded along the first axis."""
    first, *rest = axis_lengths(cell)
    return padded_share(first, cell.mesh.sequence_parallel_size, unit) * (rest[0] if rest else 1)


def attended_bytes(cell: CellSpec, unit: int | None = None) -> float:
    """Bytes of q (or k, v, o) of this rank's tokens and heads in all attentions along them."""
    size = Volume.of(cell)
    local = size.block_images * tokens(cell, unit) * size.width // cell.mesh.tensor
    return attending_blocks(cell) * local * size.inner


def gathered_at_the_end(cell: CellSpec, unit: int | None = None) -> float:
    """The one all-gather of tokens before the head; its backward sends nothing."""
    size, ranks = Volume.of(cell), cell.mesh.sequence_parallel_size
    whole = size.images * ranks * tokens(cell, unit) * size.width * size.stream
    return remote_fraction(ranks) * whole


def ulysses_bytes(cell: CellSpec, unit: int | None = None) -> float:
    """q, k, v there and o back: 4 (u-1)/u per forward pass, and as much per backward pass."""
    passes = Volume.of(cell).forwards + 1
    return passes * 4 * remote_fraction(cell.mesh.ulysses) * attended_bytes(cell, unit)


def ring_bytes(cell: CellSpec, unit: int | None = None) -> float:
    """K and V make r-1 hops per pass; their gradients, in float32 at least, r hops."""
    size, hops = Volume.of(cell), cell.mesh.ring
    if hops == 1:
        return 0.0
    of_kv = (size.forwards + 1) * (hops - 1) + hops * size.wide / size.inner
    return 2 * of_kv * attended_bytes(cell, unit)


def state_bytes(cell: CellSpec) -> float:
    """Bytes of the states of all attentions along the sharded axis, float32 at least."""
    size, (_, *rest) = Volume.of(cell), axis_lengths(cell)
    images = size.block_images * (rest[0] if rest else 1)
    heads = cell.transformer.num_heads // cell.mesh.tensor
    per_head = (size.width // cell.transformer.num_heads) ** 2
    return attending_blocks(cell) * images * heads * per_head * size.wide
