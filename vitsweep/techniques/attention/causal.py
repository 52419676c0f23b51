"""Softmax attention to a token itself and those before it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.technique import AttentionKernel, AttentionPattern

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class CausalScaledDotProduct(AttentionKernel):
    """scaled_dot_product_attention with `is_causal=True`: another model than a ViT.

    It is what sequence-parallel methods are published with (language models): rings have to balance
    its work.
    """

    changes_model: ClassVar[bool] = True
    recomputes_scores: ClassVar[bool] = True  # a fused kernel keeps no scores
    ring_computes_the_same: ClassVar[bool] = True  # ring attention applies the causal mask itself

    @property
    def attention_pattern(self) -> AttentionPattern:
        """T (T + 1) / 2 of the T^2 pairs of query and key."""
        return AttentionPattern(causal=True)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a class token: it is the first token, so that the mask hides all patches from it."""
        if cell.model.has_class_token(cell.classifier.pooling):
            yield (
                f"`attention={self.name}` masks all patches from the class token, which is the first "
                "token: use `classifier=pooled`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Put the causal kernel into every attention."""
        from vitsweep.techniques.attention.kernels import CausalAttend, put_into_blocks

        return put_into_blocks(model, CausalAttend())

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Give every attention the mask of which tokens a token sees."""
        import torch

        from vitsweep.model.attention import attention_modules

        def attend(q_BHTK: "Tensor", k_BHTK: "Tensor", v_BHTK: "Tensor") -> "Tensor":
            tokens = torch.arange(q_BHTK.shape[2], device=q_BHTK.device)
            seen_TT = tokens[:, None] >= tokens
            return torch.nn.functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, seen_TT)

        for module in attention_modules(model):
            vars(module)["attend"] = attend
        return model
