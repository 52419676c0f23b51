"""Attention to one block of keys and values, with what is needed to merge blocks (needs torch).

softmax(q k^T) v over all keys is the mean of the blocks' outputs, weighted by exp(logsumexp of a
block's scores): Rabe and Staats, arXiv:2112.05682; FlashAttention, arXiv:2205.14135.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


class BlockAttention(Protocol):
    """Axes: B images, H heads, T queries, S keys of one block, K head width."""

    def forward(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output (B, H, T, K) and the logsumexp of its scores (B, H, T)."""

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
    ) -> Gradients:
        """Return the gradients of q, k and v, given output and logsumexp over *all* blocks."""


class Plain:
    """Scores in memory: for every device, dtype and shape, and to compare others with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Keep nothing but the logsumexp."""
        scores = _scores(q, k, causal)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
    ) -> Gradients:
        """FlashAttention, algorithm 4: D = sum(dO * O), dS = P * (dO v^T - D)."""
        p = (_scores(q, k, causal) - lse.unsqueeze(-1)).exp()
        delta = (gradient * out).sum(-1, keepdim=True)
        ds = (p * (gradient @ v.mT - delta) * q.shape[-1] ** -0.5).to(q.dtype)
        return ds @ k, ds.mT @ q, p.to(q.dtype).mT @ gradient


class FlashOnCpu:
    """The kernel behind scaled_dot_product_attention on CPU; every float type."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Call the kernel that returns the logsumexp too."""
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
    ) -> Gradients:
        """Call its backward."""
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal
        )


class FlashOnCuda:
    """FlashAttention 2 in torch: float16 and bfloat16, head widths divisible by 8."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Call the kernel that returns the logsumexp too."""
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
    ) -> Gradients:
        """Call its backward; without dropout the random state is not read."""
        none: Any = None
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, none, none, q.shape[2], k.shape[2], 0.0, causal,
            unused, unused,
        )  # fmt: skip


def block_attention(q: Tensor, *, scores_in_memory: bool) -> BlockAttention:
    """Return the kernel for tensors like `q`; `scores_in_memory` asks for the plain one."""
    if scores_in_memory:
        return Plain()
    if q.device.type == "cpu":
        return FlashOnCpu()
    if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
        return FlashOnCuda()
    return Plain()


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores
