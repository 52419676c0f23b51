"""Linear attention: states instead of scores."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import exp, floor, log2
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

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
            `per_head` gives head h exp(-slope of h) with ALiBi's slopes (arXiv:2108.12409), as the
            code of LASP does (OpenNLPLab/LASP, `build_slope_tensor`).
    """

    causal: bool
    decay: Annotated[float, Gt(0), Le(1)] | Literal["per_head"]

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
        from vitsweep.techniques.attention.kernels import put_linear_into_blocks

        return put_linear_into_blocks(model, self.causal, self._decay)

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Weigh each token for each other, without states and chunks; without a mask by one state."""
        from vitsweep.model.attention import attention_modules

        for module in attention_modules(model):
            decay = self._decay(module.num_heads) if self.causal else None  # type: ignore[arg-type]
            vars(module)["attend"] = partial(_plain, decay)
        return model

    def _decay(self, num_heads: int) -> float | tuple[float, ...]:
        if self.decay != "per_head":
            return self.decay
        return tuple(exp(-slope) for slope in alibi_slopes(num_heads))


def _plain(
    decay: float | tuple[float, ...] | None, q_BHTK: "Tensor", k_BHTK: "Tensor", v_BHTK: "Tensor"
) -> "Tensor":
    """Attend to all tokens where `decay` is None, else to those up to each."""
    import torch
    from torch.nn.functional import elu

    tokens, wide = q_BHTK.shape[2], torch.promote_types(q_BHTK.dtype, torch.float32)
    q, k, v = elu(q_BHTK) + 1, (elu(k_BHTK) + 1) / k_BHTK.shape[3], v_BHTK
    if decay is None:
        return q @ ((k.mT @ v).to(wide) / tokens).to(v.dtype)
    place = torch.arange(tokens, device=q.device, dtype=wide)
    distance_TT = place[:, None] - place
    base_H11 = torch.tensor(decay, device=q.device, dtype=wide).view(-1, 1, 1)
    weight_HTT = torch.where(distance_TT >= 0, base_H11 ** distance_TT.clamp_min(0), 0)
    weight_HTT /= weight_HTT.sum(-1, keepdim=True)
    return q @ k.mT * weight_HTT.to(v.dtype) @ v


def alibi_slopes(num_heads: int) -> list[float]:
    """Return a slope for each head, 2^(-8 i / n) for i = 1 to n heads (ALiBi, arXiv:2108.12409).

    Where n is no power of two, the slopes of the next lower one come first, and then every other
    one of the next higher, as in the authors' code.
    """
    whole = 2 ** floor(log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    if whole == num_heads:
        return slopes
    return slopes + alibi_slopes(2 * whole)[0::2][: num_heads - whole]
