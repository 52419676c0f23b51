"""One pre-norm transformer block, and a sequence of them."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitsweep.model.attention import Attention
from vitsweep.model.layer import Layer, is_marked
from vitsweep.model.rotary import RotaryPosition
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


class SwiGlu(nn.Module):
    """down(silu(gate x) * (up x)) (Shazeer, arXiv:2002.05202); gate and up are one product."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * mlp_width)
        self.down = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Work on each token by itself; the shape stays."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(Layer):
    """Attention between tokens, then the MLP on each; norms come before, residuals around."""

    def __init__(
        self, spec: TransformerSpec, *, batch_first: bool, rotary: RotaryPosition | None = None
    ) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.attention: nn.Module = Attention(
            spec.width, spec.num_heads, batch_first=batch_first, rotary=rotary
        )
        self.norm_mlp = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.mlp: Mlp | SwiGlu = (SwiGlu if spec.mlp == "swiglu" else Mlp)(
            spec.width, spec.mlp_width
        )
        self.scale_attention: nn.Parameter | None = None
        self.scale_mlp: nn.Parameter | None = None
        if spec.layer_scale:
            self.scale_attention = nn.Parameter(torch.full((spec.width,), spec.layer_scale))
            self.scale_mlp = nn.Parameter(torch.full((spec.width,), spec.layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        """Transform the tokens of each image; the shape stays."""
        x = x + self.attend_branch(self.norm_attention(x))
        return x + self.mlp_branch(self.norm_mlp(x))

    def attend_branch(self, normed: Tensor) -> Tensor:
        """Return what attention adds to the residual stream."""
        y = self.attention(normed)
        return y if self.scale_attention is None else y * self.scale_attention

    def mlp_branch(self, normed: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream."""
        y = self.mlp(normed)
        return y if self.scale_mlp is None else y * self.scale_mlp


class BlockStack(nn.Module):
    """A model that runs its blocks one after the other; so does each stage of a pipeline of it."""

    def transform(self, x: Tensor, blocks: Iterable[nn.Module]) -> Tensor:
        """Run some of the model's blocks; the shape of the tokens stays."""
        for block in blocks:
            x = block(x)
        return x


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer, or those that a model of the user's names."""
    return [m for m in model.modules() if isinstance(m, Block) or is_marked(m)]


def swap_block_class(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Let the `forward` of `kind` wrap that of every block of `model`.

    Each block becomes an instance of a subclass of `kind` and of its own class, in this order: it
    stays the same object with the same parameters, names and hooks.
    """
    for block in blocks_of(model):
        block.__class__ = swapped(kind, type(block))
    return model


_SUBCLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def swapped(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of both, one for all blocks of a class: they share one compilation."""
    if (kind, own) not in _SUBCLASSES:
        _SUBCLASSES[kind, own] = type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})
    return _SUBCLASSES[kind, own]
