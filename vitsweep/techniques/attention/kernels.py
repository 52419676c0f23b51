"""Implementations of the `attend` seam (needs torch; imported when a technique is applied)."""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from vitsweep.model.attention import Attend, Attention, attend, attention_modules
from vitsweep.model.block import Block

BACKENDS: dict[str, SDPBackend | list[SDPBackend]] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "cudnn_first": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
}


def _attend(
    backend: SDPBackend | list[SDPBackend], q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor
) -> Tensor:
    # The backward pass needs no context: autograd keeps the kernel that the forward pass took.
    with sdpa_kernel(backend, set_priority=isinstance(backend, list)):
        return attend(q_BHTK, k_BHTK, v_BHTK)


class CausalAttend:
    """softmax over the token itself and those before it; (B, H, T, K) three times -> (B, H, T, K)."""

    causal = True

    def __call__(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        """Let torch choose the kernel."""
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)


@cache
def _compiled_flex() -> Any:
    # Static shapes: every step of a cell has the same, and a guard on them costs little.
    return torch.compile(flex_attention, dynamic=False)


def attend_by_flex(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """FlexAttention's softmax(q k^T / sqrt(K)) v; (B, H, T, K) three times -> (B, H, T, K)."""
    # Not compiled, FlexAttention writes all scores to memory; inside a compiled block the
    # surrounding compiler fuses it.
    fused = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return fused(q_BHTK, k_BHTK, v_BHTK)


def attend_everywhere_by(model: nn.Module, backend: str) -> nn.Module:
    """Let every module that attends do so by `backend`, those of a user's model too.

    It fails where `backend` cannot run, instead of taking another; `cudnn_first` takes the first kernel of a
    list that can run.
    """
    for module in attention_modules(model):
        module.attend = partial(_attend, BACKENDS[backend])  # type: ignore[assignment]
    return model


def put_into_blocks(model: nn.Module, kernel: Attend) -> nn.Module:
    """Let every block of ours attend by a kernel."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = kernel
    return model


class SelfAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with the signature of `model.attention.Attention`."""

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
