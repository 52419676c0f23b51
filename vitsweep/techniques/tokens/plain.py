"""Every patch, and what tokens the model has besides."""

from dataclasses import dataclass

from vitsweep.spec.model_variant import TokenVariant


@dataclass(frozen=True, kw_only=True)
class AllTokens(TokenVariant):
    """All patches go through all blocks."""
