"""One pre-norm transformer block."""

import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.attention import Attention
from vitsweep.model.layer import Layer
from vitsweep.spec.model_spec import TransformerSpec


class Mlp(nn.Module):
    """Two linears with GELU between them (the exact one, by the error function)."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, mlp_width)
        self.down = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Work on each token by itself; the shape stays."""
        return self.down(F.gelu(self.up(x)))


class Block(Layer):
    """Attention between tokens, then the MLP on each; norms come before, residuals around."""

    def __init__(self, spec: TransformerSpec, *, batch_first: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.attention: nn.Module = Attention(spec.width, spec.num_heads, batch_first=batch_first)
        self.norm_mlp = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.mlp = Mlp(spec.width, spec.mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the tokens of each image; the shape stays."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


def swap_block_class(model: nn.Module, kind: type[Block]) -> nn.Module:
    """Turn every block of `model` into a `kind`, a subclass with another `forward`.

    The block stays the same object with the same parameters, names and hooks.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.__class__ = kind
    return model
