"""Sequence parallelism on plain image ViTs equals one process, to the last digit."""

from pathlib import Path

import pytest

from tests.cells import TINY, entry
from tests.equivalence import differences
from tests.ranks import on_ranks
from tests.sequence_parallel.equal import pass_differences
from vitsweep.spec.cell_spec import CellSpec

EXACT = ("precision.dtype=float64", "optimizer=sgd_loop", "optimizer.learning_rate=0.05")


def cell(*overrides: str, ranks: int) -> CellSpec:
    found = entry(*TINY, *EXACT, f"resources.ranks_per_node={ranks}", *overrides)
    assert not found.reasons, found.reasons
    return found.cell


METHODS = {
    "ulysses": ["sequence_parallel=ulysses"],
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_output_and_all_gradients_equal_one_process(ranks: int, tmp_path: Path) -> None:
    cells = [cell(*chosen, ranks=ranks) for chosen in METHODS.values()]
    for sharing in cells:
        (answer,) = on_ranks(ranks, pass_differences, sharing, [sharing], folder=tmp_path)[0]
        print(answer)
        assert max(answer["output"], answer["input"], answer["weights"]) < 1e-10
        assert answer["scale"] > 1e-3


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "fsdp", "zero2"])
def test_training_equals_one_process(sharding: str, ranks: int, tmp_path: Path) -> None:
    for chosen in METHODS.values():
        sharing = cell(*chosen, f"sharding={sharding}", ranks=ranks)
        (answer,) = on_ranks(ranks, differences, sharing, [sharing], folder=tmp_path)[0]
        assert answer["loss"] < 1e-10
        assert answer["weights"] < 1e-9
        assert answer["moved"] > 1e-3
