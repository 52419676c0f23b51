"""Long-sequence segmentation: own queries against the keys and values of all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel, Volume
from vitsweep.techniques.sequence_parallel.sent_bytes import (
    attended_bytes,
    gathered_at_the_end,
    tokens,
)

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

    cites = ("wang2023ultra",)

    axes: ClassVar[tuple[str, ...]] = ("sequence",)

    def tokens_per_rank(self, cell: "CellSpec") -> tuple[int, ...]:
        """The padded share of the first axis, times the other one."""
        return (tokens(cell),) * cell.transformer.depth

    def sent_bytes_per_step(self, cell: "CellSpec") -> dict[str, float]:
        """K and V to n - 1 ranks per forward pass, their gradients back, the all-gather at the end."""
        passes = Volume.of(cell).forwards + 1
        of_kv = 2 * (cell.mesh.sequence_parallel_size - 1) * attended_bytes(cell)
        return {"activation": passes * of_kv + gathered_at_the_end(cell)}

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
        from vitsweep.model.attention import token_axes
        from vitsweep.techniques.sequence_parallel.token_sharding import (
            replace_attend,
            shard_tokens,
        )
        from vitsweep.techniques.sequence_parallel.wrapped_attention import to_all_keys

        along, group = token_axes(model)[0], world.token_group()
        shard_tokens(model, along, along, group)
        replace_attend(model, along, lambda attend: to_all_keys(attend, along.length, group))
        return model
