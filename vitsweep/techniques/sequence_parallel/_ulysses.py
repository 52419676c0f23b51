"""All-to-all around attention: tokens sharded outside, heads sharded inside (needs torch)."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives.shards import switch
from vitsweep.model.attention import Attend


def over_heads(attend: Attend, num_tokens: int, group: ProcessGroup) -> Attend:
    """Return an `attend` on this rank's tokens that runs the given one on whole images.

    Args:
        attend: any kernel; it sees all `num_tokens` tokens and H/n heads.
        num_tokens: tokens over all ranks of the group, without padding.
        group: n ranks with adjacent parts of the tokens.
    """

    def exchanged(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        # q, k and v travel in one message.
        qkv = torch.stack((q_BHTK, k_BHTK, v_BHTK))
        q, k, v = switch(qkv, whole=3, sharded=2, length=num_tokens, group=group)
        heads = q_BHTK.shape[1]
        return switch(attend(q, k, v), whole=1, sharded=2, length=heads, group=group)

    return exchanged
