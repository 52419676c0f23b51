"""From pixels to tokens: patches, class token, registers, position."""

import torch
from torch import Tensor, nn

from vitsweep.spec.model_spec import ViTSpec


class Embedding(nn.Module):
    """Cut images into patches, project each to width D, add its learned position.

    Axes: B images, C channels, P patches, T tokens, D width. C is 1 after the patches
    unless every channel has tokens of its own.

    With `tokens_per_channel` each channel has filters of its own and P patches of its own, channel
    after channel (as the per-variable embedding of ClimaX, arXiv:2301.10343).

    `position` is (T, D), not (1, T, D): sharding splits the first axis, and an axis of size one
    would leave the whole tensor to one rank.

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
    ) -> None:
        super().__init__()
        groups = spec.in_channels if spec.tokens_per_channel else 1
        self.width = spec.width
        self.batch_first = batch_first
        self.channels_last = channels_last
        self.patch = nn.Conv2d(
            spec.in_channels,
            groups * spec.width,
            kernel_size=spec.patch_px,
            stride=spec.patch_px,
            groups=groups,
        )
        num_positions = spec.num_patches(resolution_px) + class_token
        learned = spec.position == "learned"
        self.position = nn.Parameter(torch.zeros(num_positions, spec.width)) if learned else None
        self.class_token = nn.Parameter(torch.zeros(spec.width)) if class_token else None
        some = spec.registers > 0
        self.registers = nn.Parameter(torch.zeros(spec.registers, spec.width)) if some else None
        self.num_prefix_tokens = spec.registers + class_token

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Embed images; (B, C, H, W) -> (B, T, D), or (T, B, D) where the batch comes second."""
        if self.channels_last:
            images_BCHW = images_BCHW.contiguous(memory_format=torch.channels_last)
        # A grouped convolution gives its channels one after another, each of width D.
        x_BCDP = self.patch(images_BCHW).flatten(2).unflatten(1, (-1, self.width))
        # The one change of layout: the blocks after it keep the order of the axes.
        if self.batch_first:
            x = x_BCDP.permute(0, 1, 3, 2).flatten(1, 2)
        else:
            x = x_BCDP.permute(1, 3, 0, 2).flatten(0, 1)
        token_axis = 1 if self.batch_first else 0
        if self.class_token is not None:
            first = self.class_token.expand_as(x.narrow(token_axis, 0, 1))
            x = torch.cat([first, x], dim=token_axis)
        # Without `contiguous` the sum would keep the strides of the convolution, and so would the
        # residual stream through all blocks: every LayerNorm would copy.
        x = x.contiguous()
        if self.position is not None:
            x = x + (self.position if self.batch_first else self.position.unsqueeze(1))
        return x if self.registers is None else self._with_registers(x, self.registers, token_axis)

    def _with_registers(self, x: Tensor, registers: Tensor, token_axis: int) -> Tensor:
        """Insert the registers, which have no position, between class token and patches."""
        images = x.shape[1 - token_axis]
        inserted = registers.unsqueeze(1 - token_axis).expand(
            *((images, -1, -1) if token_axis else (-1, images, -1))
        )
        first = 0 if self.class_token is None else 1
        before, patches = x.split([first, x.shape[token_axis] - first], dim=token_axis)
        return torch.cat([before, inserted.to(x.dtype), patches], dim=token_axis)
