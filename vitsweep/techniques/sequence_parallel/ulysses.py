"""DeepSpeed-Ulysses: attention on whole images with a share of the heads."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel
from vitsweep.spec.rules import largest_degree

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Ulysses(SequenceParallel):
    """Two all-to-alls around each attention (Jacobs et al., arXiv:2309.14509).

    Tokens are sharded everywhere but inside attention, where heads are. Any attention kernel runs
    unchanged. Odd numbers of tokens are padded at the end of the last share; attention never sees
    the padding.
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses",)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse degrees that do not divide the heads."""
        yield from heads_conflicts(cell, self.name)

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the tokens; exchange them for heads around each attention along them."""
        from vitsweep.techniques.sequence_parallel.token_sharding import on_own_tokens
        from vitsweep.techniques.sequence_parallel.wrapped_attention import over_heads

        group = world.token_group()
        return on_own_tokens(model, world, lambda own, length: over_heads(own, length, group))


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
