"""How far tensors of two trainings are apart, by name and norm."""

import torch
from torch import Tensor

from vitsweep.training.shards import Named

LEAST = 1e-2
"""A gradient is measured by its norm, and a nearly vanishing one by this share of a typical norm."""
FEW_NUMBERS = 16
"""So many numbers may have the digits of half precision by chance."""


def norms_of(tensors: Named) -> dict[str, float]:
    """Return name -> L2 norm, computed in float64 and read at once."""
    if not tensors:
        return {}
    norms = torch.stack([wide(t.detach()).norm() for t in tensors.values()])
    return dict(zip(tensors, norms.tolist(), strict=True))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, or in complex128."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def typical_norm(norms: dict[str, float]) -> float:
    """Return the root mean square."""
    return (sum(n * n for n in norms.values()) / len(norms)) ** 0.5


def minus(these: Named, those: Named) -> Named:
    """Return differences by the names of `those`, in float64; what is missing counts as zero."""
    return {
        n: (wide(these[n].reshape(t.shape)) if n in these else 0) - wide(t)
        for n, t in those.items()
    }


def beyond_half(tensor: Tensor) -> float:
    """Share of the numbers with more than 11 binary digits (bfloat16: 8); 0 of few, by chance less."""
    if tensor.numel() < FEW_NUMBERS:
        return 0.0
    return float((tensor.float().view(torch.int32) & 0x1FFF != 0).double().mean())


def longer(found: Named, wanted: Named, norms: dict[str, float]) -> dict[str, float]:
    """By what share each gradient that does not nearly vanish is longer in its own direction."""
    least = LEAST * typical_norm(norms)
    large = {n: wanted[n] for n, norm in norms.items() if norm > least and n in found}
    apart = minus(found, large)
    if not large:
        return {}
    shares = [(apart[n] * wide(g)).sum().real / norms[n] ** 2 for n, g in large.items()]
    return dict(zip(large, torch.stack(shares).tolist(), strict=True))


def furthest(
    what: str, apart: dict[str, float], bounds: dict[str, float], norms: dict[str, float]
) -> str:
    """Say which tensor is furthest outside of its bound; "" where none is."""
    outside = {n: d for n, d in apart.items() if not d <= bounds[n]}  # a NaN is outside
    if not outside:
        return ""
    name = max(outside, key=lambda n: outside[n] / (bounds[n] or 1e-300))
    size = norms[name] or 1.0
    return (
        f"{what} of `{name}` differs from plain training's by {outside[name] / size:.3g} of its norm (L2), "
        f"where rounding explains {bounds[name] / size:.3g} at most,"
    )
