"""Dropped images and tokens, registers, parallel branches: equal to plain loops on several ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.techniques.sequence_parallel import formulas
from tests.techniques.sequence_parallel.cases import answers, cell
from tests.techniques.sequence_parallel.equal import training_differences
from tests.techniques.sequence_parallel.test_volume import counted, in_order
from vitsweep.spec.cell_spec import CellSpec

BLOCKS = ("vit_block=drop_samples", "vit_block=parallel")
TOKENS = ("tokens=drop", "tokens=registers")
BOTH = ("vit_block=drop_samples", "tokens=drop")
OVER_RANKS = (
    ("sequence_parallel=ulysses",),
    ("sequence_parallel=ring",),
    ("sequence_parallel=lss",),
    ("sequence_parallel=lasp2", "attention=linear"),
    ("sequence_parallel=megatron_sp",),
    ("tensor_parallel=megatron",),
    ("pipeline_parallel=gpipe",),
    ("pipeline_parallel=one_f_one_b", "memory=recompute_blocks"),
)
SIXTEEN = "batch.images_per_step=16"  # two images in each of four micro-batches of two replicas
MODERN = ("model.mlp=swiglu", "model.layer_scale=0.5", "model.registers=2")
FEW = [
    (*MODERN, "sequence_parallel=megatron_sp"),
    (*MODERN, "sequence_parallel=ulysses", "optimizer.clip_norm=0.5"),
    (*BOTH, "sequence_parallel=ulysses"),
    (*BOTH, "tensor_parallel=megatron", "layout=batch_second"),
    (*BOTH, "pipeline_parallel=one_f_one_b", "memory=recompute_blocks", SIXTEEN),
    ("vit_block=parallel", "tokens=registers", "sequence_parallel=megatron_sp"),
]


def assert_equal_training(cells: list[CellSpec], folder: Path) -> None:
    wrong: list[Any] = [
        (name, found)
        for name, found in answers(training_differences, cells, folder)
        if not (found["loss"] < 1e-10 and found["weights"] < 1e-10 and found["moved"] > 1e-3)
    ]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
def test_variants_on_two_ranks_are_their_loops(tmp_path: Path) -> None:
    assert_equal_training([cell(2, *case) for case in FEW], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variant", [*BLOCKS, *TOKENS])
def test_every_variant_under_every_way_to_share_an_image(
    variant: str, ranks: int, tmp_path: Path
) -> None:
    cells = [
        cell(ranks, variant, f"model.depth={max(2, ranks)}", *case, SIXTEEN)  # a block per stage
        for case in OVER_RANKS
    ]
    assert_equal_training(cells, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("variant", [BOTH, MODERN, ("vit_block=parallel", "tokens=registers")])
def test_the_bytes_that_variants_send_equal_the_formulas(
    variant: tuple[str, ...], tmp_path: Path
) -> None:
    cells = [cell(2, *variant, *case, SIXTEEN) for case in OVER_RANKS]
    found = in_order(cells, answers(counted, cells, tmp_path))
    for each, (name, sent) in zip(cells, found, strict=True):
        for purpose, expected in formulas.sent(each).items():
            assert sent[purpose] == pytest.approx(expected, rel=1e-12), (name, purpose)
