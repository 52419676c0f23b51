"""The `attend` seam with FlexAttention (needs torch and its compiler; imported when applied)."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention


@cache
def _compiled() -> Any:
    # Static shapes: every step of a cell has the same, and a guard on them costs little.
    return torch.compile(flex_attention, dynamic=False)


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(K)) v, (B, H, T, K) three times -> (B, H, T, K)."""
    # Not compiled, FlexAttention writes all scores to memory; inside a compiled block the
    # surrounding compiler fuses it.
    fused = flex_attention if torch.compiler.is_compiling() else _compiled()
    return fused(q_BHTK, k_BHTK, v_BHTK)
