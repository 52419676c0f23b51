"""Every technique trains what the plain single-process model trains.

Each combination is trained for a few steps on 1, 2 or 4 ranks and compared with reference training on
the whole batch: losses, and every weight at the end. `make test` takes all pairs of choices, the number
of ranks being one of them, `make test-full` the product; the same tests run on GPUs where there are any.
"""

from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.cells import GPU_NODE, LAPTOP, TINY, entry
from tests.equivalence import differences
from tests.pairs import Combination, all_pairs
from tests.ranks import on_ranks
from vitsweep.spec.cell_spec import CellSpec

GROUPS = {
    "precision": ["fp32", "O0", "O1", "O2", "O3", "bf16", "bf16_params", "bf16_masters"],
    "sharding": ["none", "ddp", "zero1", "zero2", "fsdp", "hsdp"],
    "optimizer": [
        "adamw_loop", "adamw_foreach", "adamw_fused", "adamw_contiguous",
        "sgd_loop", "sgd_foreach", "sgd_fused", "sgd_contiguous",
    ],
    "layout": ["batch_first", "batch_second"],
    "layout.patch_embedding": ["convolution", "linear"],
    "classifier": ["token", "pooled"],
    "attention": ["sdpa_auto", "mha_module", "sdpa_math", "sdpa_flash"],
    "memory": ["keep_all", "recompute_blocks", "recompute_selected"],
    "vit_block": ["plain", "drop_samples", "parallel"],
    "tokens": ["all", "drop", "registers"],
    "batch.accumulation_steps": ["1", "2"],
    "optimizer.clip_norm": ["null", "0.5"],
}  # fmt: skip

RANKS = "resources.ranks_per_node"

LOSS_TOLERANCE = {
    # relative; full precision runs in float64 here, where only the order of sums differs
    "fp32": 1e-10,
    "O0": 1e-5,
    "O1": 5e-3,
    "O2": 5e-3,
    "O3": 1e-2,
    "bf16": 5e-3,
    "bf16_params": 1e-2,
    "bf16_masters": 1e-2,
}
WEIGHT_TOLERANCE = {
    # of the largest weight of a tensor, under SGD; AdamW's first steps are signs of gradients, so
    # that rounding decides them wherever a gradient is nearly zero
    "fp32": 1e-9,
    "O0": 1e-3,
    "O1": 5e-2,
    "O2": 8e-2,
    "O3": 1e-1,  # no master weights: an update below a weight's last digit is lost
    "bf16": 5e-2,
    "bf16_params": 1e-1,
    "bf16_masters": 5e-2,
}


def overrides(combination: Combination, ranks: int) -> list[str]:
    chosen = [f"{group}={choice}" for group, choice in combination.items()]
    rate = "0.05" if combination["optimizer"].startswith("sgd") else "0.003"
    exact = ["precision.dtype=float64"] if combination["precision"] == "fp32" else []
    world = [] if RANKS in combination else [f"{RANKS}={ranks}"]
    threads = "resources.threads_per_rank=1"
    return [*TINY, *chosen, *world, threads, f"optimizer.learning_rate={rate}", *exact]


def possible(combination: Combination, ranks: int) -> bool:
    return not entry(*overrides(combination, ranks)).reasons


def by_mesh(cells: list[CellSpec]) -> list[list[CellSpec]]:
    """Cells with the same mesh can share one world."""
    groups: dict[object, list[CellSpec]] = {}
    for cell in cells:
        groups.setdefault((cell.mesh, cell.resources), []).append(cell)
    return list(groups.values())


def assert_equal_training(
    combinations: list[Combination], ranks: int, folder: Path, seconds: float = 600
) -> None:
    machine = GPU_NODE if torch.cuda.device_count() >= ranks else LAPTOP
    cells = [entry(*overrides(c, ranks), machine=machine).spec for c in combinations]
    wrong = []
    for sharing in by_mesh(cells):
        answers, *_ = on_ranks(
            ranks, differences, sharing[0], sharing, folder=folder, seconds=seconds
        )
        wrong += [
            (names(c), a) for c, a in zip(sharing, answers, strict=True) if not is_equal(c, a)
        ]
    assert not wrong, "\n".join(f"{name}: {answer}" for name, answer in wrong)


def is_equal(cell: CellSpec, answer: dict[str, float]) -> bool:
    precision, exact = cell.precision.name, cell.precision.name == "fp32"
    weights_count = exact or cell.optimizer.name.startswith("sgd")
    return (
        answer["moved"] > 1e-3  # a training that stands still would prove nothing
        and answer["loss"] <= LOSS_TOLERANCE[precision]
        and (answer["weights"] <= WEIGHT_TOLERANCE[precision] or not weights_count)
    )


def names(cell: CellSpec) -> str:
    chosen = {group: technique.name for group, technique in cell.techniques.items()}
    return " ".join(f"{g}={n}" for g, n in chosen.items() if not g.endswith("parallel"))


@cache
def pairs_of_techniques_and_ranks() -> list[Combination]:
    worlds = {RANKS: ["1", "2", "4"]}
    return all_pairs(GROUPS | worlds, lambda c: possible(c, int(c[RANKS])))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2, 4])
def test_every_pair_of_techniques_and_ranks_trains_as_the_reference_model(
    ranks: int, tmp_path: Path
) -> None:
    combinations = [c for c in pairs_of_techniques_and_ranks() if c[RANKS] == str(ranks)]
    assert len(combinations) > 15
    assert_equal_training(combinations, ranks, tmp_path)


def test_precision_by_sharding_trains_as_the_reference_model(tmp_path: Path) -> None:
    plain = {group: choices[0] for group, choices in GROUPS.items()} | {"optimizer": "sgd_loop"}
    chosen = [
        plain | {"precision": precision, "sharding": sharding}
        for precision, sharding in product(GROUPS["precision"], ["ddp", "zero1", "zero2", "fsdp"])
    ]
    assert_equal_training(chosen, 2, tmp_path)


def test_emulated_fp8_trains_as_the_reference_model_to_its_three_bits(tmp_path: Path) -> None:
    emulated = [
        "precision.layers=all",
        "precision.emulate=true",
        "optimizer=sgd_loop",
        "optimizer.learning_rate=0.05",
    ]
    chosen = [("fp8", "ddp"), ("fp8", "fsdp"), ("fp8_masters", "zero1")]
    cells = [entry(*TINY, *emulated, f"precision={p}", f"sharding={s}").spec for p, s in chosen]
    for sharing in by_mesh(cells):
        for answer in on_ranks(2, differences, sharing[0], sharing, folder=tmp_path)[0]:
            assert 1e-6 < answer["loss"] < 1e-2  # rounding is there, and no more than that
            assert answer["weights"] < 0.3


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("precision", GROUPS["precision"])
def test_the_product_of_techniques_trains_as_the_reference_model(
    precision: str, ranks: int, tmp_path: Path
) -> None:
    varied = ("sharding", "optimizer", "memory", "layout", "classifier", "attention")
    plain = {group: choices[0] for group, choices in GROUPS.items()} | {"precision": precision}
    everything = [
        plain | dict(zip(varied, choices, strict=True))
        for choices in product(*(GROUPS[group] for group in varied))
    ]
    assert_equal_training([c for c in everything if possible(c, ranks)], ranks, tmp_path, 7200)
