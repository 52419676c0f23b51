"""Ring attention: keys and values travel from rank to rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.model_parallel import SequenceParallel, padded_share

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.model.attention import Attend
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Ring(SequenceParallel):
    """K and V blocks pass from rank to rank; partial softmaxes are merged by logsumexp (arXiv:2310.01889).

    The next block travels while the present one is attended to. No limit by heads. The kernel is
    the one that gives its logsumexp: flash on CPU, flash on CUDA in half precision, else a reference
    one with the scores of one pair of blocks in memory.

    Attributes:
        order: `contiguous`, or `zigzag`, which gives each rank one part from either end of the
            sequence, so that all ranks have the same work under a causal mask.
    """

    order: Literal["contiguous", "zigzag"]

    axes: ClassVar[tuple[str, ...]] = ("ring",)

    def unit(self, cell: "CellSpec") -> int:
        """Two parts for each rank in zigzag order."""
        return super().unit(cell) * (2 if self.order == "zigzag" else 1)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse kernels without a logsumexp, and zigzag order without a causal mask."""
        if not cell.attention.ring_computes_the_same:
            yield (
                f"`sequence_parallel={self.name}` merges blocks by the logsumexp of their scores, which "
                f"`attention={cell.attention.name}` does not give: use `attention=sdpa_auto` or "
                "`sdpa_flash`, or `sequence_parallel=ulysses`, which runs any kernel."
            )
        if self.order == "zigzag" and not cell.attention.attention_pattern.causal:
            yield (
                f"`sequence_parallel.order=zigzag` balances the work under a causal mask, but "
                f"`attention={cell.attention.name}` has none: use `sequence_parallel.order=contiguous` "
                f"with `sequence_parallel={self.name}`, or `attention=sdpa_causal`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the tokens; exchange them for heads over `mesh.ulysses`, ring attention over `mesh.ring`."""
        from vitsweep.techniques.sequence_parallel.ring_attention import ring_in_place_of
        from vitsweep.techniques.sequence_parallel.token_sharding import on_own_tokens
        from vitsweep.techniques.sequence_parallel.wrapped_attention import over_heads

        row, column = world.axis("ulysses").get_group(), world.axis("ring").get_group()
        size, zigzag = world.token_group().size(), self.order == "zigzag"
        unit = 2 * size if zigzag else size

        def attention(own: "Attend", length: int) -> "Attend":
            padded = unit * padded_share(length, unit)
            ring = ring_in_place_of(own, length, padded, column, zigzag=zigzag)
            return over_heads(ring, padded // column.size(), row)

        return on_own_tokens(model, world, attention, column.size() if zigzag else 0)
