"""How many images, patches, blocks and products a choice keeps: at its smallest, and one more."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import TINY, entry
from tests.choices import choice
from tests.shapes import build, replace
from vitsweep.model.linear_attention import (
    _chunk_size,
    _states_before_chunks,
    _total_weights,
    causal_mean,
    state,
)
from vitsweep.techniques.memory.checkpointed_blocks import _narrows
from vitsweep.techniques.pipeline_parallel.runner import CHUNKS, PipelineRunner, cut

aten = torch.ops.aten


def test_a_branch_computes_its_share_of_the_images() -> None:
    def drop(rate: float) -> Any:
        return replace(choice("vit_block", "drop_samples"), rate=rate)

    assert [drop(0.25).kept(images) for images in (1, 2, 4, 8, 10)] == [1, 2, 3, 6, 8]
    assert [drop(0.9).kept(images) for images in (1, 4, 10)] == [1, 1, 1]
    assert [drop(rate).least_images for rate in (0.5, 0.25, 0.1, 0.75)] == [2, 3, 6, 3]
    for rate in (0.5, 0.25, 0.1, 0.75):
        assert 0 < round(drop(rate).least_images * (1 - rate)) < drop(rate).least_images


def test_images_keep_their_share_of_the_patches() -> None:
    def drop(keep: float) -> Any:
        return replace(choice("tokens", "drop"), keep=keep)

    assert [drop(0.5).kept(patches) for patches in (1, 2, 16, 17)] == [1, 1, 8, 8]
    assert [drop(0.1).kept(patches) for patches in (1, 4, 16)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["tokens=drop", "tokens.keep=0.04"], False),  # 16 patches: 0.64 of one
        (["tokens=drop", "tokens.keep=0.03"], True),
        (["tokens=drop", "tokens.keep=0.96"], False),
        (["tokens=drop", "tokens.keep=0.97"], True),
        (["vit_block=drop_samples", "vit_block.rate=0.06"], True),  # 8 images: 0.48 of one
        (["vit_block=drop_samples", "vit_block.rate=0.07"], False),
        (["vit_block=drop_samples", "vit_block.rate=0.93"], False),
        (["vit_block=drop_samples", "vit_block.rate=0.94"], True),
    ],
)
def test_what_drops_nothing_or_all_is_refused(words: list[str], is_refused: bool) -> None:
    one = ("resources.ranks_per_node=1", "sharding=none", "batch.images_per_step=8")
    assert bool(entry(*TINY, *one, *words).reasons) is is_refused


def test_blocks_are_dealt_out_to_stages_in_their_order() -> None:
    model = build(replace(build().spec, depth=7))
    parts = [cut(model, stage, 3, lambda: None) for stage in range(3)]  # type: ignore[arg-type, return-value]
    assert [[*part.blocks._modules] for part in parts] == [["0", "1"], ["2", "3"], ["4", "5", "6"]]  # type: ignore[union-attr]
    assert [part.embedding is not None for part in parts] == [True, False, False]
    assert [part.head is not None for part in parts] == [False, False, True]
    assert [part.norm is not None for part in parts] == [False, False, True]
    assert len(model.blocks) == 7
    assert model.head is not None


def test_chunks_of_a_stage_end_a_bubble_and_their_phase() -> None:
    marks: list[str] = []
    runner = PipelineRunner(nn.Identity(), lambda a, b: a.sum() + b, "gpipe", 4, None)  # type: ignore[arg-type]
    runner._mark, runner._scale, runner._divisor = marks.append, lambda loss: 8 * loss, 4
    for phase in CHUNKS.values():
        assert runner._marked(lambda x, y=0: x + y, phase)(1, y=2) == 3
    assert marks == ["bubble", "forward", "bubble", "backward"]
    assert float(runner._loss(torch.tensor([1.0, 2.0]), torch.tensor(1.0))) == 8.0
    assert marks[-1] == "forward"


def test_linears_with_fewer_outputs_than_inputs_are_computed_again() -> None:
    for operation, shape, narrows in (
        (aten.addmm.default, (64, 32), True),
        (aten.mm.default, (64, 32), True),
        (aten.addmm.default, (32, 64), False),
        (aten.addmm.default, (32, 32), False),
        (aten._scaled_mm.default, (64, 32), False),
        (aten.bmm.default, (64, 32), False),
    ):
        assert _narrows(operation, (None, torch.zeros(shape))) is narrows


def test_chunks_are_about_the_root_of_the_tokens_and_equally_long() -> None:
    sizes = {
        1: 1,
        16: 16,
        64: 64,
        65: 33,
        128: 64,
        1024: 64,
        4096: 64,
        16384: 128,
        65536: 256,
        2**20: 256,
    }
    assert {tokens: _chunk_size(tokens) for tokens in sizes} == sizes


def test_states_and_weights_of_chunks_by_their_sums() -> None:
    own = torch.tensor([1.0, 10.0, 100.0]).reshape(1, 1, 3, 1, 1)
    entering = _states_before_chunks(own, 0.5, None).flatten().tolist()
    assert entering == [0.0, 1.0, 10.5]
    before = torch.tensor(8.0).reshape(1, 1, 1, 1)
    assert _states_before_chunks(own, 0.5, before).flatten().tolist() == [8.0, 5.0, 12.5]
    like = torch.zeros(1)
    assert _total_weights(0, 3, 1.0, like).flatten().tolist() == [1, 2, 3]
    assert _total_weights(2, 2, 0.5, like).flatten().tolist() == [1.75, 1.875]


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_a_mean_over_earlier_tokens_is_its_loop(decay: float) -> None:
    """130 tokens are two chunks; those before the first one are a state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 1, 150, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    first = 20
    before = state(k[:, :, :first], v[:, :, :first], decay)
    found = causal_mean(*(x[:, :, first:] for x in (q, k, v)), decay, first, before)[0, 0]
    summed, weights = torch.zeros(3, 3, dtype=torch.float64), 0.0
    for place in range(150):
        summed = decay * summed + k[0, 0, place, :, None] * v[0, 0, place]
        weights = decay * weights + 1
        if place == first - 1:
            torch.testing.assert_close(before[0, 0], summed)
        if place >= first:
            torch.testing.assert_close(found[place - first], q[0, 0, place] @ summed / weights)


def test_a_rank_of_padding_alone_has_an_empty_state() -> None:
    empty = torch.zeros(1, 2, 0, 3, dtype=torch.bfloat16)
    found = state(empty, empty, 0.9)
    assert (found.shape, found.dtype, float(found.abs().sum())) == (
        (1, 2, 3, 3),
        torch.float32,
        0.0,
    )
