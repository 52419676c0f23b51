"""Sequence parallelism equals one process, to the last digit, odd sizes and masks included."""

from pathlib import Path

import pytest

from tests.techniques.sequence_parallel.cases import AXIAL, VIDEO, answers, cell
from tests.techniques.sequence_parallel.equal import pass_differences, training_differences
from vitsweep.spec.cell_spec import CellSpec

CAUSAL = ("attention=sdpa_causal", "classifier=pooled")
ZIGZAG = (*CAUSAL, "sequence_parallel.order=zigzag")
LINEAR = ("attention=linear", "attention.causal=true", "classifier=pooled")
DECAY = (*LINEAR, "attention.decay=0.9", "batch.resolution_px=10")
CASES = [
    ("sequence_parallel=ulysses",),
    ("sequence_parallel=ulysses", "classifier=pooled", "layout=batch_second"),
    ("sequence_parallel=ulysses", *CAUSAL, "optimizer.clip_norm=0.5"),
    ("sequence_parallel=ulysses", *VIDEO),
    ("sequence_parallel=ulysses", *AXIAL),
    ("sequence_parallel=ring",),
    ("sequence_parallel=ring", "layout=batch_second"),
    ("sequence_parallel=ring", *CAUSAL),
    ("sequence_parallel=ring", *ZIGZAG),
    ("sequence_parallel=ring", *VIDEO),
    ("sequence_parallel=ring", *AXIAL),
    ("sequence_parallel=usp",),
    ("sequence_parallel=usp", *ZIGZAG),
    ("sequence_parallel=usp", *VIDEO),
    ("sequence_parallel=dsp", *VIDEO),
    ("sequence_parallel=dsp", *AXIAL),
    ("sequence_parallel=lasp", *LINEAR),
    ("sequence_parallel=lasp", *DECAY),
    ("sequence_parallel=lasp", *LINEAR, *VIDEO, "classifier=token"),
    ("sequence_parallel=lasp2", "attention=linear"),
    ("sequence_parallel=lasp2", *DECAY),
    ("tensor_parallel=megatron", *DECAY),
    ("sequence_parallel=lasp2", "attention=linear", *AXIAL),
    ("sequence_parallel=ulysses", *DECAY),
    ("sequence_parallel=lss",),
    ("sequence_parallel=lss", "classifier=pooled", "layout=batch_second", "batch.resolution_px=10"),
    ("sequence_parallel=lss", *AXIAL),
    ("sequence_parallel=lss", *VIDEO),
    ("tensor_parallel=megatron",),
    ("tensor_parallel=megatron", *VIDEO, "optimizer.clip_norm=0.5"),
    ("sequence_parallel=megatron_sp",),
    ("sequence_parallel=megatron_sp", "classifier=pooled", "layout=batch_second"),
    ("sequence_parallel=megatron_sp", *VIDEO, "optimizer.clip_norm=0.5"),
    ("sequence_parallel=megatron_sp", *AXIAL),
]


ONE_OF_EACH = list({case[0]: case for case in CASES}.values())
"""The last case of every method, for the fast tests."""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, ONE_OF_EACH),
        pytest.param(2, CASES, marks=pytest.mark.full),
        pytest.param(4, CASES, marks=pytest.mark.slow),
        pytest.param(8, CASES, marks=pytest.mark.full),
    ],
)
def test_output_and_all_gradients_equal_one_process(
    ranks: int, cases: list[tuple[str, ...]], tmp_path: Path
) -> None:
    cells = [cell(ranks, *case, *enough_heads(ranks)) for case in cases]
    for name, apart in answers(pass_differences, cells, tmp_path):
        assert max(apart["output"], apart["input"], apart["weights"]) < 1e-10, (name, apart)
        assert apart["scale"] > 1e-3, name


def enough_heads(ranks: int) -> tuple[str, ...]:
    """Eight ranks need eight heads, of four numbers each."""
    return ("model.num_heads=8",) if ranks == 8 else ()


SHARDINGS = ["ddp", "zero1", "zero2", "fsdp"]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.full),
        pytest.param(8, marks=pytest.mark.full),
    ],
)
def test_training_equals_one_process_under_every_sharding(ranks: int, tmp_path: Path) -> None:
    rounds = (
        (*case, f"sharding={SHARDINGS[i % 4]}", f"memory={memory}")
        for i, case in enumerate(CASES)
        for memory in [("keep_all", "recompute_blocks", "recompute_selected")[i % 3]]
    )
    cells = [cell(ranks, *c, *enough_heads(ranks)) for c in rounds]
    assert_trained_alike(cells, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("memory", ["keep_all", "recompute_blocks"])
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_method_trains_alike_with_every_sharding_and_recomputation(
    ranks: int, sharding: str, memory: str, tmp_path: Path
) -> None:
    both = (f"sharding={sharding}", f"memory={memory}")
    assert_trained_alike([cell(ranks, *case, *both) for case in CASES], tmp_path)


def assert_trained_alike(cells: list[CellSpec], folder: Path) -> None:
    for name, apart in answers(training_differences, cells, folder):
        assert apart["loss"] < 1e-10, (name, apart)
        assert apart["weights"] < 1e-9, (name, apart)
        assert apart["moved"] > 1e-3, (name, apart)


HALVES = ["O1", "O2", "O3", "bf16", "bf16_params"]


@pytest.mark.full
def test_half_precision_trains_as_single_precision_within_rounding(tmp_path: Path) -> None:
    rounds = [
        (*case, f"precision={HALVES[i % 5]}", f"sharding={SHARDINGS[i % 4]}")
        for i, case in enumerate(CASES)
    ]
    for name, apart in answers(training_differences, [cell(2, *c) for c in rounds], tmp_path):
        assert apart["loss"] < 3e-2, (name, apart)
