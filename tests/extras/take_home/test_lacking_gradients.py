"""Steps of `vitsweep.apply` that lack gradients train as plain PyTorch does, or are refused."""

import random
from pathlib import Path

import pytest

from tests.extras.take_home.lacking import SHARDINGS, Asked, results, table


def drawn(count: int) -> list[Asked]:
    """Return rows with each sharding and units of two blocks, most of them of two ranks."""
    rows, rng = [*table(2)], random.Random(3)
    each = [rng.choice([row for row in rows if row.sharding == name]) for name in SHARDINGS[1:]]
    each.append(
        Asked("first block alone read", "fsdp sharding.blocks_per_unit=2", "adamw_loop", 1, 2)
    )
    each.append(Asked("frozen after an evaluation", "fsdp", "adamw_foreach", 1, 2))
    alone = [row for row in table(1) if row.sharding == "none"]
    return [*each, *rng.sample(alone, 4), *rng.sample(rows, count - len(each) - 4)]


def faults(rows: list[Asked], folder: Path) -> list[str]:
    found = {}
    for ranks in {row.ranks for row in rows}:
        (own := folder / str(ranks)).mkdir()
        found |= results([row for row in rows if row.ranks == ranks], own)
    return [fault for row, each in found.items() if (fault := row.fault(each))]


@pytest.mark.smoke
def test_drawn_trainings_are_those_of_plain_pytorch_or_refused(tmp_path: Path) -> None:
    assert not faults(drawn(18), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_are(ranks: int, tmp_path: Path) -> None:
    assert not faults([*table(ranks)], tmp_path)
