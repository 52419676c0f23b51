"""Which parameters decay."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameters in two groups: matrices with weight decay, everything else without.

    Norms, biases, position embeddings and class tokens do not decay (pycls and timm do the same
    for norms and biases; DeiT, arXiv:2012.12877, for embeddings and tokens too). A matrix is what
    has at least two axes and a name that ends in `weight`. Works on wrapped and sharded models.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim > 1 and name.endswith("weight") else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # a pipeline stage may lack one
