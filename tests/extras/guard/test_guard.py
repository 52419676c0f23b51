"""Planted faults are named at the next check of a guard, and a sound training has none."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import vitsweep
from tests.extras.guard.test_check import batches, begun, cell_of
from tests.ranks import on_ranks
from tests.refusals import require
from vitsweep.errors import BadValueError
from vitsweep.extras.guard import planted
from vitsweep.extras.guard.check import CheckResult, FaultFoundError, slowness
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

FAULTS = {
    "nothing": lambda training: planted.lost_keys(training, from_step=99),
    "keys": lambda training: planted.lost_keys(training, from_step=4),
    "frozen": lambda training: planted.frozen_weights(training, from_step=4),
    "gradients": lambda training: planted.scaled_gradients(training, rank=1, from_step=4),
    "slow": lambda training: planted.slow_rank(training, rank=1, from_step=4),
}
RATE = "optimizer.learning_rate=1e-4"  # by which the ones of a norm's weights move less than bfloat16 has


def guarded(world: World, cell: CellSpec, fault: str, seed: int, record: str) -> list[CheckResult]:
    found: list[CheckResult] = []
    with begun(world, "vit", cell) as training, FAULTS[fault](training):
        guard = vitsweep.Guard(training, 4, found.append, record=record)
        for batch in batches(world, cell, 9, seed=seed):
            guard.step(batch)
    return found


def named_in(world: World, cell: CellSpec, seeds: int, folder: str) -> list[str]:
    """Return which planted faults the reports of the first rank do not name."""
    missed = []
    for fault in [name for name in FAULTS if name != "slow" or seeds > 1]:
        for seed in range(seeds):
            record = Path(folder) / f"{fault}-{seed}.jsonl"
            reports = guarded(world, cell, fault, seed, str(record))
            if world.rank:
                assert not reports
                continue
            lines = [json.loads(line) for line in record.read_text().splitlines()]
            assert [line["step"] for line in lines] == [r.step for r in reports] == [4, 8]
            first, last = reports
            seen = {
                "nothing": (first.verdict, last.verdict, last.unmoved) == ("sound", "sound", ()),
                "keys": first.verdict == "wrong" and first.phase == "forward",
                "frozen": any(".norm" in name for name in last.unmoved),
                "gradients": (first.verdict, first.phase, first.rank) == ("wrong", "exchange", 1)
                and "rank 1 count 2 times" in str(first),
                "slow": 1 in first.slow_ranks or 1 in last.slow_ranks,
            }
            missed += [] if seen[fault] else [f"{fault} {seed}: {first} {last} {first.plain_s}"]
    return missed


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_each_planted_fault_is_named_at_the_next_check(sharding: str, tmp_path: Path) -> None:
    cell = cell_of("vit", (f"sharding={sharding}", "precision=fp32", RATE), 2)
    found = on_ranks(2, named_in, cell, cell, 1, str(tmp_path), folder=tmp_path)
    assert found == [[], []]


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_so_is_each_under_five_seeds(sharding: str, tmp_path: Path) -> None:
    cell = cell_of("vit", (f"sharding={sharding}", "precision=O2", RATE), 2)
    found = on_ranks(2, named_in, cell, cell, 5, str(tmp_path), folder=tmp_path)
    assert found == [[], []]


def test_a_fault_stops_before_the_update() -> None:
    cell = cell_of("vit", ("precision=fp32",), 1)
    alone: Any = type("Alone", (), {"rank": 0, "shape": cell.mesh})
    with begun(alone, "vit", cell) as training, planted.lost_keys(training):
        guard = vitsweep.Guard(training, 1, lambda _: None, record=None, raise_on_fault=True)
        first, second = batches(alone, cell, 2)
        guard.step(first)
        before = training.weights()
        with pytest.raises(FaultFoundError, match="forward pass") as raised:
            guard.step(second)
        assert raised.value.result.distance > 1
        assert all(torch.equal(w, before[n]) for n, w in training.weights().items())
        assert not vitsweep.is_checking()


def test_a_rank_is_slow_beside_the_others_in_the_median_pass() -> None:
    assert slowness([[1.0, 2.0]]) == []
    assert slowness([[1.0, 2.0, 3.0], [2.0, 3.0, 30.0]]) == [0.5, 2.0]
    assert slowness([[1.0], [2.0], [3.0], [12.0]]) == [1 / 3, 2 / 3, 1.5, 6.0]


def test_arguments_of_another_kind_are_refused_when_they_are_given(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "checks.jsonl")
    bare, seldom = torch.nn.Linear(4, 2), {"every_steps": 10**6, "record": None}
    refused: list[tuple[str, Any]] = [
        ("training=Linear", lambda: vitsweep.Guard(bare)),  # type: ignore[arg-type]
        ("training=Linear", lambda: vitsweep.check(bare, None)),  # type: ignore[arg-type]
    ]
    with vitsweep.apply("resources.threads_per_rank=1", torch.nn.Linear(4, 2)) as training:
        for key, values in {
            "every_steps": (0, "5", 2.5, True),
            "on_check": (3, None),
            "raise_on_fault": ("no", 0, None),
            "record": (5, missing, str(tmp_path)),
        }.items():
            for value in values:
                given = seldom | {key: value}
                refused.append((f"{key}=", partial(vitsweep.Guard, training, **given)))
        refused.append(
            ("raise_on_fault='no'", partial(vitsweep.check, training, None, raise_on_fault="no"))
        )
        for names, call in refused:
            with pytest.raises(BadValueError, match=f"^`{names}") as said:
                call()
            require(str(said.value))
