"""Ulysses copies each number as often as its exchange needs, and no more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import on_ranks
from tests.techniques.sequence_parallel.cases import cell
from vitsweep.model.attention import Attention
from vitsweep.techniques.sequence_parallel.wrapped_attention import over_heads
from vitsweep.world import World

IMAGES, TOKENS, WIDTH, HEADS = 3, 10, 32, 4
COPIES = ("copy_", "clone", "cat", "stack", "_to_copy", "constant_pad_nd", "slice_backward",
          "select_backward", "unfold_backward")  # fmt: skip


class CopiedNumbers(TorchDispatchMode):
    """Adds up the sizes of what operations write that move numbers and compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[-1] in COPIES:
            self.total += result.numel()
        return result


def without_copies(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A kernel whose output and gradients lie as flash attention's do, tokens outside heads."""
    return (q.transpose(1, 2) * k.transpose(1, 2) * v.transpose(1, 2)).transpose(1, 2)


def counted(world: World, batch_first: bool, with_ulysses: bool) -> tuple[int, int]:
    """Numbers copied in forward and backward of one attention, in units of one rank's q."""
    torch.manual_seed(0)
    attention = Attention(WIDTH, HEADS, batch_first=batch_first)
    attention.attend = without_copies
    if with_ulysses:
        attention.attend = over_heads(without_copies, TOKENS, world.axis("ulysses").get_group())
    shape = (IMAGES, TOKENS // 2, WIDTH) if batch_first else (TOKENS // 2, IMAGES, WIDTH)
    x = torch.randn(shape, requires_grad=True)
    with CopiedNumbers() as forward:
        y = attention(x)
    gradient = torch.randn_like(y)
    with CopiedNumbers() as backward:
        y.backward(gradient)
    return forward.total // x.numel(), backward.total // x.numel()


def of_both(world: World) -> list[list[tuple[int, int]]]:
    return [[counted(world, first, split) for split in (False, True)] for first in (True, False)]


@pytest.mark.slow
def test_q_k_v_are_copied_once_to_be_sent_and_outputs_twice(tmp_path: Path) -> None:
    spec = cell(2, "sequence_parallel=ulysses")
    for rank in on_ranks(2, of_both, spec, folder=tmp_path):
        for plain, exchanged in rank:
            forward, backward = (b - a for a, b in zip(plain, exchanged, strict=True))
            assert forward == 3 + 2, "q, k, v to be sent; the output to be sent, its heads joined"
            assert backward == 1 + 3 + 3, "the output's gradient; those of q, k, v, sent, joined"
