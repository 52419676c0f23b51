"""Linear attention: states instead of scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from vitsweep.spec.technique import AttentionKernel, AttentionPattern

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    recomputes_scores: ClassVar[bool] = False  # there are no scores

    @property
    def attention_pattern(self) -> AttentionPattern:
        """Linear: (K, K) states per head instead of T x T scores."""
        return AttentionPattern(causal=self.causal, linear=True)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse decay without a causal mask, and a class token (the first token) under one."""
        if self.decay != 1 and not self.causal:
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
        from vitsweep.model.linear_attention import LinearAttend
        from vitsweep.techniques.attention.kernels import put_into_blocks

        return put_into_blocks(model, LinearAttend(self.causal, self.decay))

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Weigh each token for each other, without states and chunks; without a mask by one state."""
        from vitsweep.model.attention import attention_modules

        for module in attention_modules(model):
            vars(module)["attend"] = partial(_plain, self.decay if self.causal else None)
        return model


def _plain(decay: float | None, q_BHTK: "Tensor", k_BHTK: "Tensor", v_BHTK: "Tensor") -> "Tensor":
    """Attend to all tokens where `decay` is None, else to those up to each."""
    import torch
    from torch.nn.functional import elu

    tokens, wide = q_BHTK.shape[2], torch.promote_types(q_BHTK.dtype, torch.float32)
    q, k, v = elu(q_BHTK) + 1, (elu(k_BHTK) + 1) / k_BHTK.shape[3], v_BHTK
    if decay is None:
        return q @ ((k.mT @ v).to(wide) / tokens).to(v.dtype)
    place = torch.arange(tokens, device=q.device, dtype=wide)
    distance_TT = place[:, None] - place
    weight_TT = torch.where(distance_TT >= 0, decay ** distance_TT.clamp_min(0), 0)
    weight_TT /= weight_TT.sum(-1, keepdim=True)
    return q @ k.mT * weight_TT.to(v.dtype) @ v
