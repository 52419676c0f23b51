"""Fixed sines and cosines of places and times (needs torch)."""

import torch
from torch import Tensor

PERIOD = 10_000.0
"""Of the slowest wave, nearly (arXiv:1706.03762, section 3.5)."""


def waves(places_N: Tensor, numbers: int) -> Tensor:
    """Return the angles (N, numbers) of places, in float64: place x PERIOD^(-i / numbers)."""
    steps = torch.arange(numbers, device=places_N.device, dtype=torch.float64) / numbers
    return places_N.double()[:, None] * PERIOD**-steps


def sinusoids(places_N: Tensor, width: int) -> Tensor:
    """Return (N, width), float64: sines of `waves`, then their cosines."""
    angles = waves(places_N, width // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def time_features(times_N: Tensor, width: int) -> Tensor:
    """Return (N, width), float64: cosines of `waves`, then their sines (DiT, `timestep_embedding`)."""
    angles = waves(times_N, width // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def grid_positions(
    rows: int, columns: int, width: int, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Return (rows x columns, width), float64: of the column, then of the row (as MAE).

    Args:
        rows: of the grid.
        columns: of the grid.
        width: divisible by 4.
        device: of the result.
        scale: of what places are divided by.
    """
    across, down = (
        sinusoids(torch.arange(n, device=device).double() / scale, width // 2)
        for n in (columns, rows)
    )
    return torch.cat([across.repeat(rows, 1), down.repeat_interleave(columns, 0)], dim=1)
