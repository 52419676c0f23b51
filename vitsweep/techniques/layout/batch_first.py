"""The blocks work in (B, T, D)."""

from dataclasses import dataclass
from typing import Literal

from vitsweep.spec.technique import Layout


@dataclass(frozen=True, kw_only=True)
class BatchFirst(Layout):
    """Images are the outermost axis, tokens of one image lie side by side.

    Attributes:
        channels_last: images and patch filters lie in memory as (B, H, W, C).
    """

    batch_first: Literal[True]
