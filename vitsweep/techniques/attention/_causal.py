"""The `attend` seam under a causal mask (needs torch; imported when applied)."""

import torch.nn.functional as F
from torch import Tensor


class CausalAttend:
    """softmax over the token itself and those before it; (B, H, T, K) three times -> (B, H, T, K)."""

    causal = True

    def __call__(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        """Let torch choose the kernel."""
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
