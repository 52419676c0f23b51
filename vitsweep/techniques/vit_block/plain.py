"""Attention, then the MLP, each with its norm before and a residual around."""

from dataclasses import dataclass

from vitsweep.spec.model_variant import BlockVariant


@dataclass(frozen=True, kw_only=True)
class PlainBlock(BlockVariant):
    """The pre-norm block of ViT (arXiv:2010.11929, eq. 2 and 3), on every image."""
