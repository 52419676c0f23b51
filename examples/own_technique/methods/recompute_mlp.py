"""Compute the inside of each MLP again in the backward pass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsweep.spec.technique import Memory

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class RecomputeMlp(Memory):
    """Keep only the input of each MLP for the backward pass."""

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Put a checkpoint around every MLP."""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            apply_activation_checkpointing,
        )

        from vitsweep.model.block import Mlp

        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Mlp))
        return model
