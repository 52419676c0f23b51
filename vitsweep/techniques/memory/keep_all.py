"""Keep all activations."""

from dataclasses import dataclass

from vitsweep.spec.technique import Memory


@dataclass(frozen=True, kw_only=True)
class KeepAll(Memory):
    """Whatever the backward pass reads stays where the forward pass wrote it."""
