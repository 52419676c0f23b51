"""Multi-head self-attention with one seam, `attend`, which is all that a technique may replace."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

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
    """

    def __init__(self, width: int, num_heads: int, *, batch_first: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.batch_first = batch_first
        # One product instead of three: a larger matrix, and under autocast one saved half-precision
        # copy of the input instead of three.
        self.qkv = nn.Linear(width, 3 * width)
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
        o_BHTK = self.attend(q_BHTK, k_BHTK, v_BHTK)
        from_BHTK = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        return self.out(o_BHTK.permute(from_BHTK).flatten(-2))


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that call `self.attend(q, k, v)`, ours and those of a user."""
    return [m for m in model.modules() if callable(getattr(m, "attend", None))]


class TokenAxis(NamedTuple):
    """An axis along which tokens lie.

    Attributes:
        axis: its index, from the front.
        length: tokens along it.
    """

    axis: int
    length: int
