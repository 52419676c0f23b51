"""What lies in memory where tokens are exchanged for heads, in one process."""

from types import SimpleNamespace
from typing import Any

import torch

from vitsweep.collectives.resharding import _by_tokens, _joined_heads, lies_tokens_outermost


def test_tokens_are_outermost_where_the_batch_comes_second() -> None:
    plain = torch.zeros(2, 3, 5, 4)  # images, heads, tokens, width
    assert not lies_tokens_outermost(plain)
    assert not lies_tokens_outermost(plain.transpose(1, 2).contiguous().transpose(1, 2))
    assert lies_tokens_outermost(plain.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3))


def test_chunks_of_tokens_are_joined_to_heads_as_they_will_lie() -> None:
    group: Any = SimpleNamespace(size=lambda: 3)
    x = torch.arange(2 * 2 * 7 * 2.0).reshape(2, 2, 7, 2)
    chunks = _by_tokens((x, -x), group)
    assert chunks.shape == (3, 3, 2, 2, 2, 2)  # ranks, tokens, images, tensors, heads, width
    tokens = chunks.flatten(0, 1)
    assert torch.equal(tokens[:7, :, 0].permute(1, 2, 0, 3), x)
    assert torch.equal(tokens[:7, :, 1].permute(1, 2, 0, 3), -x)
    assert not tokens[7:].any(), "padding"
    arrived = torch.arange(3 * 5 * 2 * 2 * 4.0).reshape(3, 5, 2, 2, 4)
    for outermost in (True, False):
        joined = _joined_heads(arrived, outermost)
        assert lies_tokens_outermost(joined) is outermost
        for rank in range(3):
            own = arrived[rank].permute(1, 2, 0, 3)
            assert torch.equal(joined[:, 2 * rank : 2 * rank + 2], own)
