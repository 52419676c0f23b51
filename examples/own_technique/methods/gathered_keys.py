"""Sequence parallelism by gathered keys: each rank attends from its own tokens to all tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.model.attention import Attend
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class GatheredKeys(SequenceParallel):
    """Each rank keeps T/n tokens of an image. Attention gathers the keys and values of all ranks."""

    axes: ClassVar[tuple[str, ...]] = ("sequence",)

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the tokens, and wrap the attention of each block."""
        from methods.all_gather import AllGather
        from vitsweep.techniques.sequence_parallel.token_sharding import on_own_tokens

        group = world.token_group()

        def wrapped(attend: "Attend", num_tokens: int) -> "Attend":
            def attend_to_all(q_BHTK, k_BHTK, v_BHTK):  # type: ignore[no-untyped-def]
                # Padding comes last. It is cut off, so that no query attends to it.
                k, v = (AllGather.apply(x, group)[:, :, :num_tokens] for x in (k_BHTK, v_BHTK))
                return attend(q_BHTK, k, v)

            return attend_to_all

        return on_own_tokens(model, world, wrapped)
