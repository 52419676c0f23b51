"""Linear attention: states instead of scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from vitsweep.spec.attention_pattern import AttentionPattern
from vitsweep.spec.technique import AttentionKernel

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Linear(AttentionKernel):
    """o_t = q_t sum_s d^(t-s) k_s^T v_s: no softmax, cost linear in the number of tokens.

    As in TransNormer (arXiv:2210.10340) and RetNet (arXiv:2307.08621): q and k go through 1 + ELU
    (arXiv:2006.16236), the sum is divided by the number of keys (by sum_s d^(t-s) under decay), so
    that no token count changes the scale. Another model than a ViT.

    Attributes:
        causal: a token attends to itself and those before it.
        decay: d, by which a token is weighted less per token of distance; 1 for none. Causal only.
    """

    causal: bool
    decay: Annotated[float, Gt(0), Le(1)]

    changes_model: ClassVar[bool] = True

    @property
    def recomputes_scores(self) -> bool:
        """There are no scores."""
        return False

    @property
    def attention_pattern(self) -> AttentionPattern:
        """Linear: (K, K) states per head instead of T x T scores."""
        return AttentionPattern(causal=self.causal, linear=True)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse decay without a causal mask, and a class token (the first token) under one."""
        if self.decay < 1 and not self.causal:
            yield (
                f"`attention.decay={self.decay}` needs `attention.causal=true`: without a causal mask "
                "tokens on both sides would have to decay, which is not implemented. Use `attention.decay=1`."
            )
        if self.causal and cell.model.has_class_token(cell.classifier.pooling):
            yield (
                "`attention.causal=true` masks all patches from the class token, which is the first "
                "token: use `classifier=pooled`, or `attention.causal=false`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Replace the kernel of every block."""
        from vitsweep.model.attention import Attention
        from vitsweep.model.linear_attention import LinearAttend

        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = LinearAttend(self.causal, self.decay)
        return model
