"""Diffusion Transformers for videos, STDiT3, the model of DSP (VideoSys, `STDiT3`)."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.collectives.parallel_linear import (
    Boundary,
    ColumnParallelLinear,
    Replicated,
    RowParallelLinear,
    copy_to_tensor_parallel,
)
from vitsweep.model.attention import Attention, TokenAxis
from vitsweep.model.block import Block, ConditionLinear, Context, Network, Stack, become, norm_of
from vitsweep.model.initialize import draw_weights
from vitsweep.model.vit import ALONG_X, ALONG_Y
from vitsweep.objectives.diffusion_spec import LATENT_SIDE, SINUSOIDS
from vitsweep.objectives.dit import ZERO_IN_TWINS, modulated, time_embedding
from vitsweep.objectives.positions import grid_positions, time_features, waves
from vitsweep.spec.model_spec import VideoViTSpec

# Axes: B videos, C channels, F frames, H x W numbers, X x Y tokens in time and space, L vectors of text,
#       D width, h heads, K head width, p side of a patch, f its frames.

FRAMES_PER_SECOND = 24.0
"""Of all videos: the data do not say it."""
NORM_EPS = 1e-6


class AxisAttention(Attention):
    """Self-attention along one axis of (B, X, Y, D), with an RMS norm of queries and keys.

    Args:
        width: D.
        num_heads: h.
        axis: `ALONG_X` or `ALONG_Y`.
    """

    def __init__(self, width: int, num_heads: int, axis: int) -> None:
        super().__init__(width, num_heads, batch_first=True)
        self.axis = axis
        self.scale_q = nn.Parameter(torch.ones(self.head_width))
        self.scale_k = nn.Parameter(torch.ones(self.head_width))
        self.boundary: Boundary | None = None

    def forward(self, x_BXYD: Tensor, turns: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend along the axis; `turns` are the cosines and sines (X, K) of rotary positions."""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)) for part in self.qkv(x_BXYD).chunk(3, dim=-1)
        )
        q, k = self._normed(q, self.scale_q, turns), self._normed(k, self.scale_k, turns)
        if self.axis == ALONG_X:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        folded = (each.flatten(0, 1).transpose(1, 2) for each in (q, k, v))
        o = self.attend(*folded).transpose(1, 2).unflatten(0, q.shape[:2])
        return self.out((o.transpose(1, 2) if self.axis == ALONG_X else o).flatten(-2))

    def _normed(
        self, x_BXYhK: Tensor, scale_K: Tensor, turns: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        if self.boundary is not None:  # a rank has some of the heads
            scale_K = copy_to_tensor_parallel(scale_K, self.boundary.group)
        wide = x_BXYhK.to(torch.promote_types(x_BXYhK.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * scale_K
        if turns is not None:
            cosines, sines = (each[:, None, None] for each in turns)
            even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
            wide = wide * cosines + torch.stack([-odd, even], dim=-1).flatten(-2) * sines
        return wide.to(x_BXYhK.dtype)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Attend (B, h, T, K) to the first vectors of (B, h, L, K); scores of the others are computed too."""
    mask = None
    if lengths_B is not None:
        mask = torch.arange(k.shape[2], device=k.device) < lengths_B[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Do the same on texts one after the other: by one kernel on a GPU, by a loop over videos elsewhere."""
    if lengths_B is None:
        return attend_masked(q, k, v, None)
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        images, _, tokens, _ = q.shape
        is_text = torch.arange(k.shape[2], device=k.device) < lengths_B[:, None]
        rows_q = q.transpose(1, 2).flatten(0, 1)
        rows_k, rows_v = (each.transpose(1, 2)[is_text] for each in (k, v))
        ends_q = torch.arange(images + 1, device=q.device, dtype=torch.int32) * tokens
        ends_k = F.pad(lengths_B.cumsum(0, dtype=torch.int32), (1, 0))
        found = varlen_attn(rows_q, rows_k, rows_v, ends_q, ends_k, tokens, k.shape[2])
        return found.unflatten(0, (images, tokens)).transpose(1, 2)  # type: ignore[union-attr]
    parts = zip(q.split(1), k.split(1), v.split(1), lengths_B.tolist(), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(a, b[:, :, :n], c[:, :, :n]) for a, b, c, n in parts]
    )


class CrossAttention(nn.Module):
    """Attention of all tokens to the text of their video.

    Args:
        width: D.
        num_heads: h.

    Attributes:
        packed: leave out what lies beyond the end of a text; otherwise it is computed and masked.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.packed = False
        self.q = nn.Linear(width, width)
        self.kv = ConditionLinear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BXYD: Tensor, text_BLD: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Return what each token reads; (B, X, Y, D) stays.

        Args:
            x_BXYD: tokens.
            text_BLD: vectors of text, as many for each video.
            lengths_B: how many of them are; None for all.
        """
        q_BXYD = self.q(x_BXYD)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (q_BXYD.flatten(1, 2), *self.kv(text_BLD).chunk(2, dim=-1))
        )
        o = (attend_packed if self.packed else attend_masked)(q, k, v, lengths_B)
        return self.out(o.transpose(1, 2).flatten(-2).unflatten(1, q_BXYD.shape[1:3]))


class STDiTBlock(Block):
    """Attention along one axis, cross-attention to text, MLP; the first and the last modulated and gated.

    Args:
        spec: the shape.
        axis: `ALONG_X` or `ALONG_Y`.
    """

    attention: AxisAttention

    def __init__(self, spec: VideoViTSpec, axis: int) -> None:
        super().__init__(spec, batch_first=True)
        self.axis = axis
        self.attention = AxisAttention(spec.width, spec.num_heads, axis)
        self.cross = CrossAttention(spec.width, spec.num_heads)
        self.table = nn.Parameter(torch.zeros(6, spec.width))
        self.boundary: Boundary | None = None

    def forward(self, x_BXYD: Tensor, context: Context | None = None) -> Tensor:
        """Transform tokens by `modulation` (B, 6 D), `text`, its `lengths`, `cosines` and `sines`."""
        assert context is not None
        six_B6D = self.table + context["modulation"].unflatten(-1, (6, -1))
        if self.boundary is not None:
            six_B6D = self.boundary.beside_tokens(six_B6D)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = six_B6D[:, :, None, None].unbind(1)
        turns = (context["cosines"], context["sines"]) if self.axis == ALONG_X else None
        y = self.attention(modulated(self.norm_attention(x_BXYD), shift, scale), turns)
        x_BXYD = x_BXYD + gate * y
        x_BXYD = x_BXYD + self.cross(x_BXYD, context["text"], context.get("lengths"))
        y = self.mlp_branch(modulated(self.norm_mlp(x_BXYD), mlp_shift, mlp_scale))
        return x_BXYD + mlp_gate * y

    def split(self, boundary: Boundary) -> None:
        """Keep this rank's heads of both attentions and hidden units; text is whole on every rank."""
        super().split(boundary)
        self.boundary = boundary
        self.attention.boundary = boundary
        become(self.cross.q, ColumnParallelLinear).take(boundary)
        become(self.cross.kv, ColumnParallelLinear).take(Replicated(boundary.group), parts=2)
        become(self.cross.out, RowParallelLinear).take(boundary)


class VideoEmbedding(nn.Module):
    """Patches of videos, each with the fixed sines and cosines of its place in space."""

    def __init__(self, spec: VideoViTSpec) -> None:
        super().__init__()
        side = (spec.frames_per_patch, spec.patch_px, spec.patch_px)
        self.patch = nn.Conv3d(spec.in_channels, spec.width, kernel_size=side, stride=side)

    def forward(self, videos_BCFHW: Tensor) -> Tensor:
        """Embed videos (B, C, F, H, W) -> (B, X, Y, D)."""
        x_BDXhw = self.patch(videos_BCFHW)
        _, width, _, rows, columns = x_BDXhw.shape
        scale = videos_BCFHW.shape[-1] / LATENT_SIDE
        places_YD = grid_positions(rows, columns, width, x_BDXhw.device, scale)
        x_BXYD = x_BDXhw.flatten(3).permute(0, 2, 3, 1).contiguous()
        return x_BXYD + places_YD.to(self.patch.weight.dtype)


class STDiT(Network):
    """Noisy videos (B, C, F, H, W), times and text -> velocities (B, 2 C, F, H, W), of which C are trained.

    Args:
        spec: the shape.
        resolution_px: side of a frame.
    """

    def __init__(self, spec: Any, *, resolution_px: int) -> None:
        super().__init__()
        self.spec = spec
        self.patch = (spec.frames_per_patch, spec.patch_px)
        self.head_width = spec.width // spec.num_heads
        self.draw = partial(
            draw_stdit_weight,
            zero=0.0 if spec.zero_start else ZERO_IN_TWINS,
            numbers_of_patch=spec.in_channels * spec.frames_per_patch * spec.patch_px**2,
        )
        self.embedding = VideoEmbedding(spec)
        self.time, self.frame_rate = time_embedding(spec.width), time_embedding(spec.width)
        self.modulation = nn.Linear(spec.width, 6 * spec.width)
        if spec.text_width:
            self.text = nn.Sequential(
                nn.Linear(spec.text_width, spec.width),
                nn.GELU(approximate="tanh"),
                nn.Linear(spec.width, spec.width),
            )
            self.no_text = nn.Parameter(torch.zeros(spec.text_vectors, spec.text_width))
        else:
            self.label = nn.Embedding(spec.num_classes + 1, spec.width)  # the last one: no text
        norm = norm_of(spec)
        x, y = spec.grid(resolution_px)
        self.blocks = Stack(
            (STDiTBlock(spec, ALONG_X if block % 2 else ALONG_Y) for block in range(spec.depth)),
            norm=norm,
            axes=(TokenAxis(ALONG_X, x), TokenAxis(ALONG_Y, y)),
            positions={"cosines": TokenAxis(0, x), "sines": TokenAxis(0, x)},
        )
        self.norm = norm
        self.table = nn.Parameter(torch.zeros(2, spec.width))
        self.head = nn.Linear(spec.width, spec.head_outputs)
        if not self.head.weight.is_meta:
            draw_weights(self)

    def forward(  # type: ignore[override]
        self,
        image: Tensor,
        time: Tensor,
        label: Tensor | None = None,
        text: Tensor | None = None,
        text_length: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> Tensor:
        """Predict velocities.

        Args:
            image: (B, C, F, H, W), noisy.
            time: (B, SINUSOIDS), sinusoids of 1000 t.
            label: (B,), `num_classes` for none; of data with labels alone.
            text: (B, L, text_width), of data with texts alone.
            text_length: (B,), how many of the vectors are text.
            dropped: (B,), whether the learned text takes the place of the given one, in its length.
        """
        x_BXYD = self.embedding(image)
        dtype = self.table.dtype
        rate = time_features(torch.full((1,), FRAMES_PER_SECOND, device=image.device), SINUSOIDS)
        time_BD = self.time(time) + self.frame_rate(rate.to(dtype))
        angles_XK = waves(torch.arange(x_BXYD.shape[1], device=image.device), self.head_width // 2)
        angles_XK = angles_XK.repeat_interleave(2, dim=1)
        if text is None:
            read = {"text": self.label(label)[:, None]}
        else:
            assert dropped is not None
            assert text_length is not None
            given = torch.where(dropped[:, None, None], self.no_text.to(text.dtype), text)
            read = {"text": self.text(given), "lengths": text_length}
        context = read | {
            "time": time_BD,
            "modulation": self.modulation(F.silu(time_BD)),
            "cosines": angles_XK.cos().to(dtype),
            "sines": angles_XK.sin().to(dtype),
        }
        return self.read_out(self.blocks(x_BXYD, context), context)

    def read_out(self, x_BXYD: Tensor, context: Context | None = None) -> Tensor:
        """Predict from the tokens of the last block."""
        assert context is not None
        two_B2D = self.table + context["time"][:, None]
        shift, scale = two_B2D[:, :, None, None].unbind(1)
        x = self.head(modulated(self.norm(x_BXYD), shift, scale))
        (frames, side), rows = self.patch, round(x.shape[2] ** 0.5)
        x = x.unflatten(3, (frames, side, side, -1)).unflatten(2, (rows, rows))
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def draw_stdit_weight(
    name: str,
    weight: Tensor,
    generator: torch.Generator,
    *,
    zero: float,
    numbers_of_patch: int,
) -> None:
    """Draw one weight in place as STDiT3's `initialize_weights` does.

    The source leaves the patches to torch's default of a convolution. A table of labels is ours.

    Args:
        name: in the reference model.
        weight: whole, float32.
        generator: for the random numbers.
        zero: standard deviation of what the source begins at zero.
        numbers_of_patch: fan-in of the patches' convolution.
    """
    of_block = name.removeprefix("blocks.").partition(".")[0]
    is_temporal = of_block.isdecimal() and int(of_block) % 2 == 1
    ends_branch = name.endswith(("attention.out.weight", "cross.out.weight", "mlp.down.weight"))
    if (is_temporal and ends_branch) or name.startswith("frame_rate.2."):
        nn.init.normal_(weight, std=zero, generator=generator) if zero else nn.init.zeros_(weight)
    elif name == "no_text" or name.endswith("table"):
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
    elif name.endswith((".scale_q", ".scale_k")):
        nn.init.ones_(weight)
    elif name.startswith("embedding.patch."):
        bound = numbers_of_patch**-0.5
        nn.init.uniform_(weight, -bound, bound, generator=generator)
    elif name.endswith("bias"):
        nn.init.zeros_(weight)
    elif name.startswith(("frame_rate.0.", "label.")):
        nn.init.normal_(weight, std=0.02, generator=generator)
    else:
        nn.init.xavier_uniform_(weight, generator=generator)
