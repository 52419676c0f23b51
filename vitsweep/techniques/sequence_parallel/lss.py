"""Long-sequence segmentation: own queries against the keys and values of all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class LongSequenceSegmentation(SequenceParallel):
    """Full attention with sharded queries (LSS Transformer, Wang et al., arXiv:2311.02382).

    Each rank computes the attention of its own tokens to all tokens. One fused collective per block
    gathers keys and values, and one reduce-scatter returns their gradients. Gradients of weights are
    averaged over token ranks and replicas by one all-reduce (the paper's double gradient averaging).

    Read off the paper's description and not compared with the authors' code: that K and V travel in
    one message, and that nothing else of a block is gathered.
    """

    axes: ClassVar[tuple[str, ...]] = ("sequence",)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse kernels that need as many queries as keys: masked and linear ones."""
        pattern = cell.attention.attention_pattern
        if pattern.causal or pattern.linear:
            yield (
                f"`sequence_parallel={self.name}` has fewer queries than keys on a rank, for which "
                f"`attention={cell.attention.name}` is not defined here: use `attention=sdpa_auto`, "
                "or `sequence_parallel=ulysses`, which runs any attention."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the tokens; gather keys and values before each attention along them."""
        from vitsweep.techniques.sequence_parallel.token_sharding import on_own_tokens
        from vitsweep.techniques.sequence_parallel.wrapped_attention import to_all_keys

        group = world.token_group()
        return on_own_tokens(model, world, lambda own, length: to_all_keys(own, length, group))
