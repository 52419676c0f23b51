"""Order of the axes in which the blocks work."""

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


@dataclass(frozen=True, kw_only=True)
class BatchSecond(Layout):
    """Tokens are the outermost axis: the order of pycls and of `nn.MultiheadAttention`.

    The tokens are transposed once, after the patch embedding; no block transposes again.
    pycls 484bb29 reports "~4% speedup in training"; torchvision's #4594 found the opposite sign for
    the same switch, so that a sweep has to tell.

    Attributes:
        channels_last: images and patch filters lie in memory as (B, H, W, C).
    """

    batch_first: Literal[False]
