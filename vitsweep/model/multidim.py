"""Transformers whose tokens lie along two axes, with attention along one at a time.

Video: X is time, Y is space. Axial: X are the rows, Y is the place within a row.
"""

from functools import partial

import torch
from torch import Tensor, nn

from vitsweep.model.attention import Attention, TokenAxis
from vitsweep.model.block import Block, BlockStack
from vitsweep.model.initialize import draw_transformer_weight, draw_weights
from vitsweep.spec.model_spec import MultiDimSpec

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

    def forward(self, x_BXYD: Tensor) -> Tensor:
        """Transform the tokens; the shape stays."""
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


class MultiDimViT(BlockStack):
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
        self.blocks = nn.ModuleList(
            AxisBlock(spec, ALONG_X if block % 2 else ALONG_Y) for block in range(spec.depth)
        )
        self.norm = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.head = nn.Linear(spec.width, spec.num_classes)
        if not self.head.weight.is_meta:
            draw_weights(self)

    @property
    def token_axes(self) -> tuple[TokenAxis, TokenAxis]:
        """X and Y."""
        x, y = self.embedding.grid
        return TokenAxis(ALONG_X, x), TokenAxis(ALONG_Y, y)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed, transform along Y and X in turn, read out."""
        return self.read_out(self.transform(self.embedding(inputs), self.blocks))

    def read_out(self, x_BXYD: Tensor) -> Tensor:
        """Predict from the mean over all tokens."""
        return self.head(self.norm(x_BXYD).mean(dim=(ALONG_X, ALONG_Y)))
