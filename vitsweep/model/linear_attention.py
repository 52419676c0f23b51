"""Linear attention as sums over states, whole or in parts (needs torch).

Axes: B images, H heads, T tokens, K head width of q and k, V of v (the same). phi = 1 + ELU; keys
are divided by K, as scores are by sqrt(K).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens whose scores are formed at once under a causal mask."""


def features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return phi(q), phi(k)/K and v, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return 1 + F.elu(q.to(wide)), (1 + F.elu(k.to(wide))) / q.shape[-1], v.to(wide)


def state(k: Tensor, v: Tensor, decay: float) -> Tensor:
    """Return sum_s decay^(T-1-s) k_s^T v_s, (B, H, K, V): what later tokens need of these."""
    if decay < 1:
        k = k * _powers(decay, k, range(k.shape[2] - 1, -1, -1))
    return k.mT @ v


def from_before(q: Tensor, before: Tensor, decay: float) -> Tensor:
    """Return what q gets from `before`, the state at the token before its first one."""
    if decay < 1:
        q = q * _powers(decay, q, range(1, q.shape[2] + 1))
    return q @ before


def causal_sum(q: Tensor, k: Tensor, v: Tensor, decay: float) -> Tensor:
    """Return o_t = q_t sum_{s <= t} decay^(t-s) k_s^T v_s, chunk by chunk."""
    outputs, before = [], None
    for q_, k_, v_ in zip(q.split(CHUNK, 2), k.split(CHUNK, 2), v.split(CHUNK, 2), strict=True):
        own = (q_ @ k_.mT * _distances(decay, q_)) @ v_
        outputs.append(own if before is None else own + from_before(q_, before, decay))
        new = state(k_, v_, decay)
        before = new if before is None else before * decay ** k_.shape[2] + new
    return torch.cat(outputs, 2)


def weights(first: int, tokens: int, decay: float, like: Tensor) -> Tensor:
    """Return sum_{s <= t} decay^(t-s) for t from `first`, (T, 1): what a causal sum is divided by."""
    t = torch.arange(first + 1, first + tokens + 1, device=like.device, dtype=like.dtype)
    total = t if decay == 1 else (1 - decay**t) / (1 - decay)
    return total.unsqueeze(-1)


@dataclass(frozen=True)
class LinearAttend:
    """The `attend` seam: (B, H, T, K) three times -> (B, H, T, K).

    Attributes:
        is_causal: a token attends to itself and those before it.
        decay: weight of a token per token of distance.
    """

    is_causal: bool
    decay: float

    def __call__(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        """Compute in float32 at least; the output has the dtype of v."""
        with torch.autocast(q_BHTK.device.type, enabled=False):
            q, k, v = features(q_BHTK, k_BHTK, v_BHTK)
            tokens = q.shape[2]
            if self.is_causal:
                o = causal_sum(q, k, v, self.decay) / weights(0, tokens, self.decay, q)
            else:
                o = q @ state(k, v, 1) / tokens
        return o.to(v_BHTK.dtype)


def _powers(decay: float, like: Tensor, exponents: range) -> Tensor:
    powers = [decay**e for e in exponents]
    return torch.tensor(powers, device=like.device, dtype=like.dtype).unsqueeze(-1)


def _distances(decay: float, q: Tensor) -> Tensor:
    """Return decay^(t-s) for s <= t, else 0: (T, T)."""
    t = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
    return torch.where(t[:, None] >= t, decay ** (t[:, None] - t).clamp_min(0), 0)
