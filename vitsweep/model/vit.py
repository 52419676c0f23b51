"""A plain pre-norm Vision Transformer (Dosovitskiy et al., arXiv:2010.11929)."""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.block import Block, BlockStack
from vitsweep.model.embedding import Embedding
from vitsweep.model.initialize import draw_transformer_weight, draw_weights
from vitsweep.model.rotary import RotaryPosition
from vitsweep.spec.model_spec import ViTSpec

# Axes: B images, C channels, H x W pixels, P patches, T tokens (patches and class token), D width,
#       F values that the head gives for one patch, h x w patches in a field.
# An `x` without axes is (B, T, D), or (T, B, D) where the batch comes second.


class ViT(BlockStack):
    """Images (B, C, H, W) -> logits (B, num_classes), or a field (B, num_classes, H, W).

    Args:
        spec: the shape.
        resolution_px: side of an image; fixes the number of tokens.
        pooling: what the classification head reads: the class `token` or the `mean` over tokens. A
            dense head reads every token, so that it has no class token under either.
        batch_first: order of the axes inside the blocks.
        channels_last: memory format of images and patch filters.
        linear_patches: compute the patch embedding as a product.

    Weights follow `draw` and torch's seed; they are the same in every layout.
    """

    def __init__(
        self,
        spec: ViTSpec,
        *,
        resolution_px: int,
        pooling: Literal["token", "mean"],
        batch_first: bool = True,
        channels_last: bool = False,
        linear_patches: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.draw = partial(draw_transformer_weight, layer_scale=spec.layer_scale or 1.0)
        self.resolution_px = resolution_px
        self.pooling = pooling
        self.batch_first = batch_first
        self.embedding = Embedding(
            spec,
            resolution_px=resolution_px,
            class_token=pooling == "token" and spec.head == "classify",
            batch_first=batch_first,
            channels_last=channels_last,
            as_linear=linear_patches,
        )
        self.num_tokens = spec.num_tokens(resolution_px, pooling)
        self.num_prefix_tokens = self.embedding.num_prefix_tokens
        rotary = None
        if spec.position == "rotary":
            grid, head_width = resolution_px // spec.patch_px, spec.width // spec.num_heads
            rotary = RotaryPosition(grid, head_width, self.num_prefix_tokens)
        self.blocks = nn.ModuleList(
            Block(spec, batch_first=batch_first, rotary=rotary) for _ in range(spec.depth)
        )
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        pixels = spec.patch_px**2 if spec.head == "dense" else 1
        self.head = nn.Linear(spec.width, spec.num_classes * pixels)
        if channels_last:
            self.embedding.patch.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.head.weight.is_meta:
            draw_weights(self)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Embed, transform, read out."""
        return self.read_out(self.transform(self.embedding(images_BCHW), self.blocks))

    def read_out(self, x: Tensor) -> Tensor:
        """Predict from the tokens of the last block."""
        x = self.norm(x)
        return self._field(x) if self.spec.head == "dense" else self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        token_axis = 1 if self.batch_first else 0
        if self.pooling == "token":
            return self.head(x.select(token_axis, 0))
        return self.head(self._patches(x, token_axis).mean(dim=token_axis))

    def _patches(self, x: Tensor, token_axis: int) -> Tensor:
        """Leave out the tokens before the patches, which no mean and no field counts."""
        first = self.num_prefix_tokens
        return x.narrow(token_axis, first, x.shape[token_axis] - first) if first else x

    def _field(self, x: Tensor) -> Tensor:
        """Let each token predict the pixels of its patch."""
        x_BTD = self._patches(x if self.batch_first else x.transpose(0, 1), 1)
        grid = self.resolution_px // self.spec.patch_px
        # Tokens of several channels at one place are averaged (T = channels x P, or P).
        x_BPD = x_BTD.unflatten(1, (-1, grid * grid)).mean(dim=1)
        y_BPF = self.head(x_BPD)
        y_BFhw = y_BPF.transpose(1, 2).unflatten(2, (grid, grid))
        return F.pixel_shuffle(y_BFhw, self.spec.patch_px)
