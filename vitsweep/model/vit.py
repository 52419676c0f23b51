"""Pre-norm Vision Transformers (Dosovitskiy et al., arXiv:2010.11929)."""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.attention import Attention, TokenAxis
from vitsweep.model.block import Block, Context, Network, Stack
from vitsweep.model.initialize import draw_transformer_weight, draw_weights
from vitsweep.spec.model_spec import MultiDimSpec, ViTSpec

# From pixels to tokens: patches, class token, registers, position.


class Embedding(nn.Module):
    """Cut images into patches, project each to width D, add its learned position.

    Axes: B images, C channels, P patches (h x w of them), p pixels of a patch's side, K pixels of all
    channels of a patch, T tokens, D width.

    `position` is (T, D), not (1, T, D): sharding splits the first axis, and an axis of size one
    would leave the whole tensor to one rank.

    Args:
        spec: the shape.
        resolution_px: side of an image.
        class_token: whether there is one.
        batch_first: order of the axes of the tokens.
        channels_last: memory format of the images for a convolution.
        as_linear: compute the convolution as a product with the pixels of each patch side by side. The
            parameters stay those of the convolution.

    Attributes:
        num_prefix_tokens: class token and registers, which come before the patches.
    """

    def __init__(
        self,
        spec: ViTSpec,
        *,
        resolution_px: int,
        class_token: bool,
        batch_first: bool,
        channels_last: bool,
        as_linear: bool = False,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.channels_last = channels_last
        self.as_linear = as_linear
        self.patch = nn.Conv2d(
            spec.in_channels, spec.width, kernel_size=spec.patch_px, stride=spec.patch_px
        )
        num_positions = spec.num_patches(resolution_px) + class_token
        self.position = nn.Parameter(torch.zeros(num_positions, spec.width))
        self.class_token = nn.Parameter(torch.zeros(spec.width)) if class_token else None
        some = spec.registers > 0
        self.registers = nn.Parameter(torch.zeros(spec.registers, spec.width)) if some else None
        self.num_prefix_tokens = spec.registers + class_token

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Embed images; (B, C, H, W) -> (B, T, D), or (T, B, D) where the batch comes second."""
        token_axis = 1 if self.batch_first else 0
        if self.as_linear:  # by products, already in the order of the blocks
            size = self.patch.kernel_size[0]
            pixels_BChpwp = images_BCHW.unflatten(3, (-1, size)).unflatten(2, (-1, size))
            # `flatten` makes the one copy, in the order of the blocks: (B, h, w, K) or (h, w, B, K).
            order = (0, 2, 4, 1, 3, 5) if self.batch_first else (2, 4, 0, 1, 3, 5)
            patches = pixels_BChpwp.permute(order).flatten(3).flatten(token_axis, token_axis + 1)
            x = F.linear(patches, self.patch.weight.flatten(1), self.patch.bias)
        else:
            if self.channels_last:
                images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
            x_BDP = self.patch(images_BCHW).flatten(2)
            # The one change of layout: the blocks after it keep the order of the axes.
            x = x_BDP.permute(0, 2, 1) if self.batch_first else x_BDP.permute(2, 0, 1)
        if self.class_token is not None:
            first = self.class_token.expand_as(x.narrow(token_axis, 0, 1))
            x = torch.cat([first, x], dim=token_axis)
        # Without `contiguous` the sum would keep the strides of the convolution, and so would the
        # residual stream through all blocks: every LayerNorm would copy.
        position = self.position_of(x.shape[token_axis])
        x = x.contiguous() + (position if self.batch_first else position.unsqueeze(1))
        if self.registers is None:
            return x
        # which have no position: between class token and patches
        shape = [-1, -1, -1]
        shape[1 - token_axis] = x.shape[1 - token_axis]
        inserted = self.registers.unsqueeze(1 - token_axis).expand(*shape).to(x.dtype)
        start = 0 if self.class_token is None else 1
        before, patches = x.split([start, x.shape[token_axis] - start], dim=token_axis)
        return torch.cat([before, inserted, patches], dim=token_axis)

    def position_of(self, length: int) -> Tensor:
        """Return the positions (T, D) of images with so many tokens, registers left out."""
        return self.position


# Axes: B images, C channels, H x W pixels, P patches, T tokens (patches and class token), D width,
#       F values that the head gives for one patch, h x w patches in a field.
# An `x` without axes is (B, T, D), or (T, B, D) where the batch comes second.


class ViT(Network):
    """Images (B, C, H, W) -> logits (B, num_classes).

    Args:
        spec: the shape.
        resolution_px: side of an image; fixes the number of tokens.
        pooling: what the head reads: the class `token` or the `mean` over patches.
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
            class_token=pooling == "token",
            batch_first=batch_first,
            channels_last=channels_last,
            as_linear=linear_patches,
        )
        self.num_tokens = spec.num_tokens(resolution_px, pooling)
        self.num_prefix_tokens = self.embedding.num_prefix_tokens
        norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.blocks = Stack(
            (Block(spec, batch_first=batch_first) for _ in range(spec.depth)),
            norm=norm,
            axes=(TokenAxis(1 if batch_first else 0, self.num_tokens),),
        )
        self.norm = norm
        self.head = nn.Linear(spec.width, spec.num_classes)
        if channels_last:
            self.embedding.patch.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not self.head.weight.is_meta:
            draw_weights(self)

    def read_out(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Predict from the tokens of the last block."""
        x, token_axis = self.norm(x), 1 if self.batch_first else 0
        if self.pooling == "token":
            return self.head(x.select(token_axis, 0))
        first = self.num_prefix_tokens  # which no mean counts
        patches = x.narrow(token_axis, first, x.shape[token_axis] - first) if first else x
        return self.head(patches.mean(dim=token_axis))


# Transformers whose tokens lie along two axes, with attention along one at a time.
# Video: X is time, Y is space. Axial: X are the rows, Y is the place within a row.

# Axes: B inputs, C channels, F frames, H x W pixels, X x Y tokens, D width.

ALONG_X, ALONG_Y = 1, 2


class AxisBlock(nn.Module):
    """A block whose attention runs along one axis of (B, X, Y, D), all others being batch.

    Attributes:
        axis: `ALONG_X` or `ALONG_Y`.
    """

    def __init__(self, spec: MultiDimSpec, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.block = Block(spec, batch_first=True)

    @property
    def attention(self) -> Attention:
        """The attention of the block inside."""
        return self.block.attention  # type: ignore[return-value]

    def forward(self, x_BXYD: Tensor, context: Context | None = None) -> Tensor:
        """Transform the tokens; the shape stays, and no context is read."""
        if self.axis == ALONG_Y:
            return self._apply_block(x_BXYD)
        return self._apply_block(x_BXYD.transpose(1, 2)).transpose(1, 2)

    def _apply_block(self, x: Tensor) -> Tensor:
        return self.block(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class GridEmbedding(nn.Module):
    """Patches or tubelets on a grid, each knowing its place along both axes.

    `position_x` and `position_y` are added (factorised positions): (X, D) and (Y, D).
    """

    def __init__(self, spec: MultiDimSpec, resolution_px: int) -> None:
        super().__init__()
        self.grid = spec.grid(resolution_px)
        patch = (spec.frames_per_patch, spec.patch_px, spec.patch_px)
        self.patch = nn.Conv3d(spec.in_channels, spec.width, kernel_size=patch, stride=patch)
        self.position_x = nn.Parameter(torch.zeros(self.grid[0], spec.width))
        self.position_y = nn.Parameter(torch.zeros(self.grid[1], spec.width))

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed videos (B, C, F, H, W) or images (B, C, H, W) -> (B, X, Y, D)."""
        videos_BCFHW = inputs if inputs.ndim == 5 else inputs.unsqueeze(2)
        x_BXYD = self.patch(videos_BCFHW).flatten(2).unflatten(2, self.grid).permute(0, 2, 3, 1)
        return x_BXYD.contiguous() + self.position_x.unsqueeze(1) + self.position_y


class MultiDimViT(Network):
    """Videos or images -> logits (B, num_classes).

    Args:
        spec: the shape.
        resolution_px: side of an image; fixes the number of tokens.
    """

    def __init__(self, spec: MultiDimSpec, *, resolution_px: int) -> None:
        super().__init__()
        self.spec = spec
        self.draw = partial(draw_transformer_weight, layer_scale=spec.layer_scale or 1.0)
        self.embedding = GridEmbedding(spec, resolution_px)
        norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        x, y = spec.grid(resolution_px)
        self.blocks = Stack(
            (AxisBlock(spec, ALONG_X if block % 2 else ALONG_Y) for block in range(spec.depth)),
            norm=norm,
            axes=(TokenAxis(ALONG_X, x), TokenAxis(ALONG_Y, y)),
        )
        self.norm = norm
        self.head = nn.Linear(spec.width, spec.num_classes)
        if not self.head.weight.is_meta:
            draw_weights(self)

    def read_out(self, x_BXYD: Tensor, context: Context | None = None) -> Tensor:
        """Predict from the mean over all tokens."""
        return self.head(self.norm(x_BXYD).mean(dim=(ALONG_X, ALONG_Y)))
