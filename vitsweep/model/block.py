"""One pre-norm transformer block."""

import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.attention import Attention
from vitsweep.model.layer import Layer, is_marked
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


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer, or those that a model of the user's names."""
    return [m for m in model.modules() if isinstance(m, Block) or is_marked(m)]


def swap_block_class(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Let the `forward` of `kind` wrap that of every block of `model`.

    Each block becomes an instance of a subclass of `kind` and of its own class, in this order: it
    stays the same object with the same parameters, names and hooks.
    """
    for block in blocks_of(model):
        block.__class__ = _subclass(kind, type(block))
    return model


_SUBCLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def _subclass(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return one class for all blocks of a class, so that they share one compilation."""
    if (kind, own) not in _SUBCLASSES:
        _SUBCLASSES[kind, own] = type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})
    return _SUBCLASSES[kind, own]
