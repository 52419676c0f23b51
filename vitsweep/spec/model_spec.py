"""Shapes of Vision Transformers, and what follows from them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt


@dataclass(frozen=True, kw_only=True)
class ViTSpec:
    """A plain pre-norm Vision Transformer (Dosovitskiy et al., arXiv:2010.11929).

    Attributes:
        depth: number of blocks.
        width: D, the size of a token.
        num_heads: H; `width` must be a multiple of it.
        mlp_width: hidden size of the MLP.
        patch_px: side of a patch in pixels.
        in_channels: channels of an image.
        num_classes: labels, or channels of the predicted field with `head=dense`.
        tokens_per_channel: True gives every channel tokens of its own (as scientific ViTs do:
            S = (H/p)(W/p) x channels), False folds the channels into the patch.
        head: `classify` reads one vector per image; `dense` predicts a field of the input's size.
        norm_eps: epsilon of LayerNorm.
    """

    name: str
    depth: Annotated[int, Gt(0)]
    width: Annotated[int, Gt(0)]
    num_heads: Annotated[int, Gt(0)]
    mlp_width: Annotated[int, Gt(0)]
    patch_px: Annotated[int, Gt(0)]
    in_channels: Annotated[int, Gt(0)]
    num_classes: Annotated[int, Gt(0)]
    tokens_per_channel: bool
    head: Literal["classify", "dense"]
    norm_eps: float

    def num_patches(self, resolution_px: int) -> int:
        """Tokens of one image without the class token."""
        grid = resolution_px // self.patch_px
        return grid * grid * (self.in_channels if self.tokens_per_channel else 1)

    def num_tokens(self, resolution_px: int, pooling: str) -> int:
        """Tokens of one image; one more where a class token is used."""
        return self.num_patches(resolution_px) + (pooling == "token" and self.head == "classify")
