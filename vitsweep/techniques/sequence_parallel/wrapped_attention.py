"""Attention kernels wrapped by the exchange that a method puts around them (needs torch)."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives.parallel_linear import gather_from_sequence_parallel
from vitsweep.collectives.primitives import check_share
from vitsweep.collectives.resharding import lies_tokens_outermost, to_heads, to_tokens
from vitsweep.model.attention import Attend


def over_heads(attend: Attend, num_tokens: int, group: ProcessGroup) -> Attend:
    """Return an `attend` on this rank's tokens that runs the given one on whole images.

    Args:
        attend: any kernel; it sees all `num_tokens` tokens and H/n heads.
        num_tokens: tokens over all ranks of the group, without padding.
        group: n ranks with adjacent parts of the tokens.
    """

    if group.size() == 1:
        return attend

    def exchanged(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        outermost = lies_tokens_outermost(q_BHTK)
        q, k, v = to_heads(q_BHTK, k_BHTK, v_BHTK, num_tokens, group)
        return to_tokens(attend(q, k, v), group, outermost)

    return exchanged


def to_all_keys(attend: Attend, num_tokens: int, group: ProcessGroup) -> Attend:
    """Return an `attend` of this rank's queries to the keys and values of all ranks.

    Args:
        attend: any kernel without a mask; it sees T/n queries and all `num_tokens` keys.
        num_tokens: tokens over all ranks of the group, without padding.
        group: n ranks with adjacent parts of the tokens.
    """

    def gathered(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        check_share(k_BHTK, 2, num_tokens, group)
        # One message each way: keys and values forward, both gradients backward.
        kv = gather_from_sequence_parallel(torch.stack((k_BHTK, v_BHTK)), 3, group)
        k, v = kv.narrow(3, 0, num_tokens)  # padding comes last
        return attend(q_BHTK, k, v)

    return gathered
