"""`nn.MultiheadAttention` in the place of our attention (needs torch; imported when applied)."""

from typing import Any

from torch import Tensor, nn

from vitsweep.model.attention import Attention
from vitsweep.model.block import Block


class SelfAttention(nn.MultiheadAttention):
    """The module of torch, with our signature."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attend within each image; the shape stays."""
        # Since torch 2.0 the module calls scaled_dot_product_attention unless weights are asked
        # for. Asked for them without the mean over heads, it still is what it was in 2022: bmm,
        # softmax, bmm, in the dtype of its input (SDPA's math kernel computes halves in float32).
        return super().forward(x, x, x, need_weights=True, average_attn_weights=False)[0]


def replace_attention(model: nn.Module) -> nn.Module:
    """Put `nn.MultiheadAttention` into every block, around the parameters that are there."""
    for block in model.modules():
        if isinstance(block, Block) and isinstance(block.attention, Attention):
            block.attention = _around_parameters_of(block.attention)
    return model


def _around_parameters_of(attention: Attention) -> SelfAttention:
    width = attention.out.out_features
    # On the meta device nothing is allocated or drawn; every parameter is replaced right away.
    module = SelfAttention(
        width, attention.num_heads, batch_first=attention.batch_first, device="meta"
    )
    qkv: Any = attention.qkv  # torch's stubs call its parameters tensors
    out: Any = attention.out
    module.in_proj_weight, module.in_proj_bias = qkv.weight, qkv.bias
    module.out_proj.weight, module.out_proj.bias = out.weight, out.bias
    return module.train(attention.training)
