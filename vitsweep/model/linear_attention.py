"""Linear attention as sums over states, in batched chunks of tokens (needs torch).

Axes: B images, H heads, T tokens, K head width of q and k, V of v (the same), n chunks of C tokens.
phi = 1 + ELU (arXiv:2006.16236); keys are divided by K, as scores are by sqrt(K).

Under a causal mask scores are formed within each chunk, and everything before a chunk is one state
(K, V) (arXiv:2307.08621, section 2.3: the chunkwise form of RetNet). All chunks are computed at once.
Products run in the dtype of q, k and v; states are added up in float32 at least.
"""

from dataclasses import dataclass
from math import log2

import torch
from torch import Tensor
from torch.nn.functional import elu, pad


def features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return phi(q), phi(k)/K and v, (B, H, T, K) each, in their own dtype."""
    return elu(q).add_(1), elu(k).add_(1).div_(q.shape[-1]), v


def state(k: Tensor, v: Tensor, decay: float) -> Tensor:
    """Return sum_s decay^(T-1-s) k_s^T v_s, (B, H, K, V), in float32 or wider.

    Later tokens need nothing else of k (B, H, T, K) and v (B, H, T, V).
    """
    if not k.shape[2]:  # a rank that holds padding alone
        return (k.mT @ v).to(_wide(k))
    states = _states_of_chunks(k, v, decay)
    if decay == 1:
        return states.sum(2)
    tokens, size = k.shape[2], _chunk_size(k.shape[2])
    ends = size * torch.arange(1, states.shape[2] + 1, device=k.device)
    weights = decay ** (tokens - ends).clamp_min(0).to(states.dtype)
    return torch.einsum("hn,bhnkv->bhkv", weights.expand(states.shape[1], -1), states)


def causal_mean(
    q: Tensor, k: Tensor, v: Tensor, decay: float, first: int = 0, before: Tensor | None = None
) -> Tensor:
    """Return o_t = q_t (sum_{s <= t} decay^(t-s) k_s^T v_s) / sum_{s <= t} decay^(t-s).

    Args:
        q: (B, H, T, K), with `features` applied.
        k: the same for keys.
        v: values, (B, H, T, V).
        decay: weight of a token per token of distance.
        first: number of tokens before these.
        before: their `state`, (B, H, K, V); None where there are none.

    Returns:
        (B, H, T, V) in the dtype of q.
    """
    tokens, size = q.shape[2], _chunk_size(q.shape[2])
    entering = _states_before_chunks(_states_of_chunks(k, v, decay), decay**size, before)
    # Sums of weights, (n, C, 1): at each token, which its output is divided by, and
    # at the last one of its chunk, which keeps states in the range of float16 however many tokens
    # there are.
    total = _total_weights(first, entering.shape[2] * size, decay, entering).unflatten(
        -2, (-1, size)
    )
    last = total[..., -1:, :]
    qs, ks, vs = (_in_chunks(x, size) for x in (q, k, v))
    qs = qs * (last / total).to(q.dtype)
    within = qs @ ks.mT * (_distances(decay, size, entering) / last).to(q.dtype)
    if decay != 1:
        qs = qs * _columns(decay, torch.arange(1, size + 1, device=q.device), qs)
    earlier = qs @ (entering / last).to(q.dtype)
    outputs = torch.baddbmm(*(x.flatten(0, 2) for x in (earlier, within, vs))).view_as(vs)
    return outputs.flatten(2, 3)[:, :, :tokens]


@dataclass(frozen=True)
class LinearAttend:
    """The `attend` seam: (B, H, T, K) three times -> (B, H, T, K), in the dtype of v.

    Attributes:
        is_causal: a token attends to itself and those before it.
        decay: weight of a token per token of distance.
    """

    is_causal: bool
    decay: float

    def __call__(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        """Attend to all tokens, or to those up to each."""
        with torch.autocast(q_BHTK.device.type, enabled=False):
            q, k, v = features(q_BHTK, k_BHTK, v_BHTK)
            if self.is_causal:
                return causal_mean(q, k, v, self.decay)
            return q @ (state(k, v, 1) / q.shape[2]).to(q.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _chunk_size(tokens: int) -> int:
    """About sqrt(T): scores within chunks, T C, and sums over chunks, (T / C)^2, are both small.

    Between 64 and 256, but for what makes all chunks equally long.
    """
    chunks = -(-tokens // 2 ** min(8, max(6, round(log2(tokens) / 2))))
    return int(-(-tokens // chunks))


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """(B, H, T, K) -> (B, H, n, C, K), padded with zeros at the end."""
    missing = -x.shape[2] % size
    return (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, size))


def _states_of_chunks(k: Tensor, v: Tensor, decay: float) -> Tensor:
    """Return each chunk's state at its last token, (B, H, n, K, V), in float32 at least."""
    tokens, size = k.shape[2], _chunk_size(k.shape[2])
    if decay != 1:
        t = torch.arange(tokens, device=k.device)
        ends = ((t // size + 1) * size).clamp_max(tokens)
        k = k * _columns(decay, ends - 1 - t, k)
    states = _in_chunks(k, size).mT @ _in_chunks(v, size)
    return states.to(_wide(k))


def _states_before_chunks(own: Tensor, decay: float, before: Tensor | None) -> Tensor:
    """Return the state that enters each chunk, (B, H, n, K, V); `decay` is that of a whole chunk."""
    n = torch.arange(own.shape[2], device=own.device, dtype=own.dtype)
    exponents = n[:, None] - 1 - n
    weights = torch.where(exponents >= 0, decay ** exponents.clamp_min(0), 0)
    entering = (weights @ own.flatten(-2)).unflatten(-1, own.shape[-2:])
    if before is None:
        return entering
    return entering + (decay**n)[:, None, None] * before.to(own.dtype).unsqueeze(2)


def _total_weights(first: int, tokens: int, decay: float, like: Tensor) -> Tensor:
    """Return sum_{s <= t} decay^(t-s) for `tokens` positions t from `first`, (T, 1)."""
    t = torch.arange(first + 1, first + tokens + 1, device=like.device, dtype=like.dtype)
    total = t if decay == 1 else (1 - decay**t) / (1 - decay ** torch.ones_like(t))
    return total.unsqueeze(-1)


def _columns(decay: float, exponents: Tensor, like: Tensor) -> Tensor:
    """Return decay^exponents as a column, (T, 1), in the dtype of `like`."""
    return (decay ** exponents.to(_wide(like))).to(like.dtype).unsqueeze(-1)


def _distances(decay: float, size: int, like: Tensor) -> Tensor:
    """Return decay^(t-s) for s <= t, else 0: (C, C)."""
    t = torch.arange(size, device=like.device, dtype=like.dtype)
    return torch.where(t[:, None] >= t, decay ** (t[:, None] - t).clamp_min(0), 0)
