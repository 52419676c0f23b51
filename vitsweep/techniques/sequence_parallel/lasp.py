"""Linear-attention sequence parallelism: states travel, not tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.model.attention import Attend
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Lasp2(SequenceParallel):
    """One all-gather of states forward and one backward (Sun et al., arXiv:2502.07563).

    A state is (heads, K, K) per image, whatever the number of tokens. Causal or not.
    """

    axes: ClassVar[tuple[str, ...]] = ("sequence",)
    chain: ClassVar[bool] = False

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse softmax attention: it has no states to exchange."""
        if not cell.attention.attention_pattern.linear:
            yield (
                f"`sequence_parallel={self.name}` exchanges the states of linear attention, and "
                f"`attention={cell.attention.name}` has none: use `attention=linear`, or "
                "`sequence_parallel=ulysses`, which runs any attention."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the tokens and exchange the states of attention between ranks."""
        from vitsweep.model.linear_attention import LinearAttend
        from vitsweep.techniques.sequence_parallel.linear_states import by_states
        from vitsweep.techniques.sequence_parallel.token_sharding import on_own_tokens

        group = world.token_group()

        def attention(own: "Attend", length: int) -> "Attend":
            assert isinstance(own, LinearAttend)
            return by_states(own, length, group, chain=self.chain)

        return on_own_tokens(model, world, attention)


@dataclass(frozen=True, kw_only=True)
class Lasp(Lasp2):
    """States passed from rank to rank, point to point (Sun et al., arXiv:2404.02882).

    Each rank waits for the state of those before it, and backward for those after it.
    """

    chain: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse attention without a causal mask: states are sent to ranks of later tokens only."""
        yield from super().conflicts(cell)
        if cell.attention.attention_pattern.linear and not cell.attention.attention_pattern.causal:
            yield (
                f"`sequence_parallel={self.name}` passes states to later tokens only and needs "
                "`attention.causal=true`; got false. Use `sequence_parallel=lasp2`, which gathers "
                "the states of all ranks."
            )
