"""Megatron-SP: tensor parallelism whose norms and residuals are sharded by tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import BYTES, SequenceParallel, Volume, remote_fraction
from vitsweep.spec.rules import tensor_split_conflicts
from vitsweep.techniques.sequence_parallel.sent_bytes import axis_lengths, padded_share

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class MegatronSp(SequenceParallel):
    """Sequence parallelism with tensor parallelism (Korthikanti et al., arXiv:2205.05198).

    The matrices of each block are split over `mesh.tensor`; the same ranks share the tokens outside
    of them. Per block two all-gathers and two reduce-scatters of the activations forward, and as
    many backward: the gathered inputs are kept, where Megatron-LM gathers them a second time.
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor",)

    def sent_bytes_per_step(self, cell: "CellSpec") -> dict[str, float]:
        """Two all-gathers and two reduce-scatters per block and pass, one gather at either end.

        Recomputation repeats all of a forward pass but its last reduce-scatter. Norms and biases
        outside the split matrices see own tokens: their gradients are all-reduced, once per step
        and in the dtype and shards in which the optimizer gets them.
        """
        size, ranks, depth = Volume.of(cell), cell.mesh.tensor, cell.transformer.depth
        first, *rest = axis_lengths(cell)
        padded = ranks * padded_share(first, ranks) * (rest[0] if rest else 1)
        image = remote_fraction(ranks) * padded * size.width
        again = size.forwards - 1
        per_block = (4 + 2 * again) * size.stream + (4 + again) * size.inner
        plan, sharded = cell.precision.plan(), cell.sharding.shards_parameters
        masters = sharded and plan.master_weights
        of_norm, of_bias = (4, 4) if masters else (BYTES[plan.norm_dtype], size.stream)
        shards = cell.mesh.state_shards if sharded else 1
        shape = cell.transformer
        norms = 2 * depth * (1 if shape.parallel_branches else 2) + 2
        biases = (4 if shape.layer_scale else 2) * depth  # with LayerScale's factors
        small = (norms * of_norm + biases * of_bias) * size.width / shards
        return {
            "activation": image * size.block_images * depth * per_block
            + image * size.images * 2 * size.stream,
            "gradient": 2 * remote_fraction(ranks) * small,
        }

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse `tensor_parallel` beside it: this technique splits the same matrices."""
        yield from tensor_split_conflicts(cell, f"sequence_parallel={self.name}")
        if cell.tensor_parallel.axes:
            yield (
                f"`sequence_parallel={self.name}` splits the matrices over `mesh.tensor` itself: "
                f"use `tensor_parallel=none` instead of `{cell.tensor_parallel.name}`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Split the linears of every block, and the tokens outside of them."""
        from vitsweep.techniques.sequence_parallel.megatron_sharding import shard_outside

        return shard_outside(model, world.axis("tensor").get_group())

    def complete_gradients(self, model: "nn.Module", world: "World") -> None:
        """Sum over the ranks what norms and biases outside the split matrices got from own tokens."""
        from vitsweep.techniques.sequence_parallel.megatron_sharding import sum_over_tokens

        sum_over_tokens(model, world.axis("tensor").get_group())
