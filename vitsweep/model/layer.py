"""What a model repeats, whatever its kind."""

from torch import nn

NORMS = (nn.LayerNorm, nn.BatchNorm2d)
"""Modules that `precision.keep_norm_fp32` spares."""


class Layer(nn.Module):
    """One of the parts that a model stacks: a transformer's block, a bottleneck.

    Sharding gathers the parameters of one layer at a time.
    """
