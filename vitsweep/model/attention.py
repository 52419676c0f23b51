"""Multi-head self-attention with one seam, `attend`, which is all that a technique may replace."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.errors import BadValueError

# Rotary positions of patches on a grid (RoFormer, arXiv:2104.09864; DINOv3, arXiv:2508.10104).


BASE = 100.0
"""Longest period over the shortest, of DINOv3."""


class RotaryPosition:
    """Turns pairs of numbers of q and k by angles that grow with a patch's row and column.

    Rows and columns run from -1 to 1 over the image, whatever its size; half of the pairs turn with
    the row, half with the column, at geometric frequencies. Class token and registers stay.

    No buffer: DDP would send it in every step.

    Args:
        grid: patches along a side.
        head_width: K, a multiple of 4.
        num_prefix_tokens: tokens before the patches.
    """

    def __init__(self, grid: int, head_width: int, num_prefix_tokens: int) -> None:
        self._grid, self._width, self._first = grid, head_width, num_prefix_tokens
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_BHTK: Tensor) -> Tensor:
        """Turn q or k; (B, H, T, K) -> (B, H, T, K)."""
        cos, sin = self._cos_and_sin(x_BHTK)
        first = self._first
        patches = x_BHTK.narrow(2, first, x_BHTK.shape[2] - first)
        a, b = patches.chunk(2, dim=-1)
        turned = patches * cos + torch.cat([-b, a], dim=-1) * sin
        return torch.cat([x_BHTK.narrow(2, 0, first), turned], dim=2) if first else turned

    def _cos_and_sin(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return both tables (P, K), made once per device and dtype."""
        if self._tables is None or (self._tables[0].device, self._tables[0].dtype) != (
            like.device,
            like.dtype,
        ):
            angles = self._angles(like.device)
            self._tables = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        return self._tables

    def _angles(self, device: torch.device) -> Tensor:
        center = torch.arange(self._grid, device=device, dtype=torch.float64) + 0.5
        side = 2 * center / self._grid - 1
        places_P2 = torch.cartesian_prod(side, side)
        quarter = self._width // 4
        periods = BASE ** (torch.arange(quarter, device=device, dtype=torch.float64) / quarter)
        angles = 2 * math.pi * places_P2.unsqueeze(2) / periods
        return angles.flatten(1).repeat(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""softmax(q k^T / sqrt(K)) v: (B, H, T, K) three times -> (B, H, T, K)."""


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Let torch choose the kernel by device, dtype and shape."""
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)


class Attention(nn.Module):
    """Self-attention over the tokens of each image.

    Axes: B images, T tokens, D width, H heads, K = D/H head width.

    `qkv.weight` is (3 D, D): all of q, then k, then v, each with its heads one after another, which
    is also the order of `nn.MultiheadAttention.in_proj_weight`.

    Args:
        width: D.
        num_heads: H; divides D.
        batch_first: whether forward takes and gives (B, T, D) or (T, B, D).
        rotary: turns q and k by the positions of their tokens; keys have no bias then, as in DINOv3. None
            where tokens carry their own positions.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        batch_first: bool,
        rotary: RotaryPosition | None = None,
    ) -> None:
        super().__init__()
        self.rotary = rotary
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.batch_first = batch_first
        # One product instead of three: a larger matrix, and under autocast one saved half-precision
        # copy of the input instead of three.
        self.qkv = nn.Linear(width, 3 * width, bias=rotary is None)
        self.query_value = None if rotary is None else QueryValueBias(width)
        self.out = nn.Linear(width, width)
        self.attend: Attend = attend

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each image; (B, T, D) -> (B, T, D), or (T, B, D) -> (T, B, D)."""
        # Views in both layouts: the kernels take strides, no element is moved. Cut along the last
        # axis, so that the backward pass joins the three gradients in one copy, ready for `qkv`.
        to_BHTK = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        q_BHTK, k_BHTK, v_BHTK = (
            # The number of heads is read off the product (-1): under tensor parallelism it is few.
            part.unflatten(-1, (-1, self.head_width)).permute(to_BHTK)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.query_value is not None:
            of_q, of_v = self.query_value.of_heads(q_BHTK)
            q_BHTK, v_BHTK = q_BHTK + of_q, v_BHTK + of_v
        if self.rotary is not None:
            q_BHTK, k_BHTK = self.rotary(q_BHTK), self.rotary(k_BHTK)
        o_BHTK = self.attend(q_BHTK, k_BHTK, v_BHTK)
        from_BHTK = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        return self.out(o_BHTK.permute(from_BHTK).flatten(-2))


class QueryValueBias(nn.Module):
    """What is added to q and v where k has no bias: (2 D), apart from `qkv`, so that FP8 may replace that.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2 * width))

    def of_heads(self, like_BHTK: Tensor) -> list[Tensor]:
        """Return what is added to q and to v, (H, 1, K) each."""
        head_width = like_BHTK.shape[-1]
        parts = self.bias.to(like_BHTK.dtype).chunk(2)
        return [part.unflatten(0, (-1, head_width)).unsqueeze(1) for part in parts]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that call `self.attend(q, k, v)`, ours and those of a user.

    Raises:
        BadValueError: there is none.
    """
    found = [m for m in model.modules() if callable(getattr(m, "attend", None))]
    if not found and not any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        raise BadValueError(
            "`model.seams=[attend]`: no module of the model has an attribute `attend`. Let its attention "
            "modules set `self.attend` to a function of q, k, v and call it, or leave the seam out."
        )
    return found


# Along which axes a model's tokens lie, and which blocks attend along which of them.


class TokenAxis(NamedTuple):
    """An axis of the residual stream.

    Attributes:
        axis: its place, from the front.
        length: tokens along it.
    """

    axis: int
    length: int


def token_axes(model: nn.Module) -> tuple[TokenAxis, ...]:
    """Return the axes between which blocks alternate; a plain ViT has one."""
    if hasattr(model, "token_axes"):
        return model.token_axes  # type: ignore[return-value]
    axis = 1 if model.batch_first else 0
    return (TokenAxis(axis, model.num_tokens),)  # type: ignore[arg-type]


def attentions_along(model: nn.Module, axis: int) -> list[Attention]:
    """Return the attention of all blocks that attend along `axis`."""
    return [
        block.attention
        for block in model.blocks  # type: ignore[union-attr]
        if getattr(block, "axis", axis) == axis
    ]
