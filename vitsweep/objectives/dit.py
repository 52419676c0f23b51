"""Diffusion Transformers for images (arXiv:2212.09748; facebookresearch/DiT)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.collectives.parallel_linear import Boundary
from vitsweep.model.attention import TokenAxis
from vitsweep.model.block import Block, ConditionLinear, Context, Network, Stack, norm_of
from vitsweep.model.initialize import draw_weights
from vitsweep.objectives.diffusion_spec import SINUSOIDS, DiffusionSpec
from vitsweep.objectives.positions import grid_positions

# Axes: B images, C channels, H x W numbers, T tokens, D width, p side of a patch.

ZERO_IN_TWINS = 0.02
"""Standard deviation of what begins at zero in trainings, where no gradient would pass in a first step."""


def modulated(x_BTD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale tokens by what follows from the condition."""
    return x_BTD * (1 + scale) + shift


class DiTBlock(Block):
    """A block whose norms are modulated, and whose branches are gated, by the condition (adaLN-zero)."""

    def __init__(self, spec: DiffusionSpec) -> None:
        super().__init__(spec, batch_first=True)
        self.modulation = ConditionLinear(spec.width, 6 * spec.width)
        self.boundary: Boundary | None = None

    def forward(self, x_BTD: Tensor, context: Context | None = None) -> Tensor:
        """Transform tokens; the context has `condition` (B, D)."""
        assert context is not None
        six = self.modulation(context["condition"])
        if self.boundary is not None:
            six = self.boundary.beside_tokens(six)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = six.unsqueeze(1).chunk(6, dim=-1)
        y = self.attend_branch(modulated(self.norm_attention(x_BTD), shift, scale))
        x_BTD = x_BTD + gate * y
        y = self.mlp_branch(modulated(self.norm_mlp(x_BTD), mlp_shift, mlp_scale))
        return x_BTD + mlp_gate * y

    def split(self, boundary: Boundary) -> None:
        """Keep this rank's heads and hidden units; the modulation is whole on every rank."""
        super().split(boundary)
        self.boundary = boundary


class LatentEmbedding(nn.Module):
    """Patches, each with the fixed sines and cosines of its place."""

    def __init__(self, spec: DiffusionSpec) -> None:
        super().__init__()
        side = spec.patch_px
        self.patch = nn.Conv2d(spec.in_channels, spec.width, kernel_size=side, stride=side)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Embed images (B, C, H, W) -> (B, T, D)."""
        x_BDhw = self.patch(images_BCHW)
        _, width, rows, columns = x_BDhw.shape
        places_TD = grid_positions(rows, columns, width, x_BDhw.device)
        x_BTD = x_BDhw.flatten(2).transpose(1, 2).contiguous()
        return x_BTD + places_TD.to(self.patch.weight.dtype)


def time_embedding(width: int) -> nn.Sequential:
    """Return what makes (B, width) of the sinusoids (B, SINUSOIDS) of times."""
    return nn.Sequential(nn.Linear(SINUSOIDS, width), nn.SiLU(), nn.Linear(width, width))


class DiT(Network):
    """Noisy images (B, C, H, W), times and labels -> velocities (B, 2 C, H, W), of which C are trained.

    Args:
        spec: the shape.
        resolution_px: side of an image.
    """

    def __init__(self, spec: DiffusionSpec, *, resolution_px: int) -> None:
        super().__init__()
        self.spec, self.patch_px = spec, spec.patch_px
        self.draw = partial(draw_dit_weight, zero=0.0 if spec.zero_start else ZERO_IN_TWINS)
        self.embedding = LatentEmbedding(spec)
        self.time = time_embedding(spec.width)
        self.label = nn.Embedding(spec.num_classes + 1, spec.width)  # the last one: no label
        tokens = spec.num_tokens(resolution_px, "mean")
        norm = norm_of(spec)
        self.blocks = Stack(
            (DiTBlock(spec) for _ in range(spec.depth)), norm=norm, axes=(TokenAxis(1, tokens),)
        )
        self.norm = norm
        self.modulation = nn.Linear(spec.width, 2 * spec.width)
        self.head = nn.Linear(spec.width, spec.head_outputs)
        if not self.head.weight.is_meta:
            draw_weights(self)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:  # type: ignore[override]
        """Predict velocities.

        Args:
            image: (B, C, H, W), noisy.
            time: (B, SINUSOIDS), sinusoids of 1000 t.
            label: (B,), `num_classes` for none.
        """
        context = {"condition": F.silu(self.time(time) + self.label(label))}
        return self.read_out(self.blocks(self.embedding(image), context), context)

    def read_out(self, x_BTD: Tensor, context: Context | None = None) -> Tensor:
        """Predict from the tokens of the last block."""
        assert context is not None
        shift, scale = self.modulation(context["condition"]).unsqueeze(1).chunk(2, dim=-1)
        x = self.head(modulated(self.norm(x_BTD), shift, scale))
        side = round(x.shape[1] ** 0.5)
        x_BhwppC = x.unflatten(2, (self.patch_px, self.patch_px, -1)).unflatten(1, (side, side))
        return x_BhwppC.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def draw_dit_weight(name: str, weight: Tensor, generator: torch.Generator, *, zero: float) -> None:
    """Draw one weight in place as DiT's `initialize_weights` does.

    Args:
        name: in the reference model.
        weight: whole, float32.
        generator: for the random numbers.
        zero: standard deviation of what the source begins at zero.
    """
    if "modulation." in name or name.startswith("head."):
        nn.init.normal_(weight, std=zero, generator=generator) if zero else nn.init.zeros_(weight)
    elif name.endswith("bias"):
        nn.init.zeros_(weight)
    elif name.startswith(("time.", "label.")):
        nn.init.normal_(weight, std=0.02, generator=generator)
    else:
        nn.init.xavier_uniform_(weight.flatten(1), generator=generator)
