"""Rotary positions of patches on a grid (RoFormer, arXiv:2104.09864; DINOv3, arXiv:2508.10104)."""

import math

import torch
from torch import Tensor

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
