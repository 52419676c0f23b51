"""First weights of a Vision Transformer, fixed by torch's seed."""

from math import sqrt
from typing import Any

import torch
from torch import nn

from vitsweep.model.attention import Attention
from vitsweep.model.block import Mlp


@torch.no_grad()
def initialize(model: Any) -> None:
    """Draw all weights of a `model.vit.ViT`, in the order of its modules.

    As pycls and the original JAX code: linears of the blocks uniform after Glorot (q, k and v each
    for itself), patch filters truncated normal with variance 1 / fan-in, positions normal with
    standard deviation 0.02, biases zero, norms one and zero.

    The head differs: those start it at zero, where no gradient reaches the body in the first step.
    It is truncated normal with 0.02 here, so that a wrong gradient shows in the first step; the
    first loss still lies near log(num_classes).
    """
    initialize_blocks(model)
    patch = model.embedding.patch
    nn.init.trunc_normal_(patch.weight, std=sqrt(1 / patch.weight[0].numel()))
    nn.init.normal_(model.embedding.position, std=0.02)
    if model.embedding.class_token is not None:
        nn.init.normal_(model.embedding.class_token, std=0.02)
    nn.init.trunc_normal_(model.head.weight, std=0.02)


@torch.no_grad()
def initialize_blocks(model: nn.Module) -> None:
    """Draw the weights of all attentions and MLPs; set the biases of all linears to zero."""
    for module in model.modules():
        if isinstance(module, Attention):
            for weight in (*module.qkv.weight.chunk(3), module.out.weight):
                nn.init.xavier_uniform_(weight)
        if isinstance(module, Mlp):
            nn.init.xavier_uniform_(module.up.weight)
            nn.init.xavier_uniform_(module.down.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
