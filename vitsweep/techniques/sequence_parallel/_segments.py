"""Attention within segments of the tokens (needs torch)."""

import torch
from torch import Tensor

from vitsweep.collectives.lengths import real, share
from vitsweep.model.attention import Attend


def within_segments(attend: Attend, num_tokens: int, segments: int, first: int = 0) -> Attend:
    """Return an `attend` whose tokens see their own segment only.

    Args:
        attend: any kernel.
        num_tokens: of an image, without padding.
        segments: of an image; the last ones may be shorter or empty.
        first: number of the first segment here.
    """
    length = share(num_tokens, segments)

    def partial(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        parts = zip(*(t.split(length, 2) for t in (q_BHTK, k_BHTK, v_BHTK)), strict=True)
        outputs = []
        for number, (q, k, v) in enumerate(parts, first):
            tokens = real(num_tokens, length, number)
            q, k, v = (t[:, :, :tokens] for t in (q, k, v))
            o = attend(q, k, v) if tokens else v
            outputs.append(
                torch.cat([o, o.new_zeros(*o.shape[:2], length - tokens, o.shape[3])], 2)
            )
        return torch.cat(outputs, 2)[:, :, : q_BHTK.shape[2]]

    return partial
