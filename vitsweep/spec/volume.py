"""Sizes from which the formulas of communication volume are computed (no torch)."""

from dataclasses import dataclass

from vitsweep.spec.cell_spec import CellSpec

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Volume:
    """Sizes of the activations that a cell sends.

    Attributes:
        images: of one step and replica.
        block_images: of these, how many each block computes.
        width: D.
        stream: bytes of a number between blocks.
        inner: bytes of a number inside attention and MLP, half of `stream` under autocast.
        forwards: forward passes of a block per step: 2 under recomputation.
    """

    images: int
    block_images: int
    width: int
    stream: int
    inner: int
    forwards: int

    @classmethod
    def of(cls, cell: CellSpec) -> "Volume":
        """Read the sizes off a cell."""
        plan, shape = cell.precision.plan(), cell.transformer
        kept, of = shape.computed_images
        images = cell.micro_batch * cell.batch.accumulation_steps
        return cls(
            images=images,
            block_images=images * kept // of,
            width=shape.width,
            stream=BYTES[plan.param_dtype],
            inner=BYTES[plan.autocast_dtype or plan.param_dtype],
            forwards=cell.memory.forwards_per_step,
        )

    @property
    def wide(self) -> int:
        """Bytes of a number where sums are kept: float32 at least."""
        return max(4, self.inner)


def remote_fraction(ranks: int) -> float:
    """(n - 1) / n: the share of a tensor that belongs to other ranks."""
    return (ranks - 1) / ranks
