"""A grid under `sweep.minutes` whose runs are simulated, on a clock that they move."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tests.builders import of_present_code, run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.planning import rounds as rounds_module
from vitsweep.planning.blocks import Block, within_minutes
from vitsweep.planning.rounds import blocks_in_turn, grid
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.record import SCREENING, RunRecord

CODE = {"packages": {"torch": "2.13.0"}}
RATIOS = {"adamw_foreach": 1.5, "adamw_fused": 1.01, "sgd_loop": 0.1}
RUN_SECONDS, SCREENING_SECONDS = 6.0, 1.0


class Bench:
    """Measures the blocks of commands; `now` is its clock."""

    def __init__(self, minutes: float, monkeypatch: pytest.MonkeyPatch, *typed: str) -> None:
        typed = typed or (f"optimizer={','.join(RATIOS)}",)
        cells = expand([*TINY, *typed, "measurement=standard"], composer())
        self.settings = replace(sweep_settings(cells[0].tree), minutes=minutes)
        self.plan = plan_of(cells, LAPTOP, composer())
        self.now, self.records, self.runs = 0.0, list[RunRecord](), Counter[str]()
        monkeypatch.setattr(rounds_module.time, "monotonic", lambda: self.now)

    def optimizer(self, cell_id: str) -> str:
        return self.plan.entries[cell_id].composed.choices["optimizer"]

    def noise(self, cell_id: str) -> float:
        """Return the factor of a cell's next run: the same in whichever order cells run."""
        self.runs[cell_id] += 1
        random = np.random.default_rng([int(cell_id, 16), self.runs[cell_id]])
        return float(np.exp(random.normal(0, 0.02)))

    def command(self) -> list[RunRecord]:
        """Run the command once; return its records."""
        mine: list[RunRecord] = []
        rounds = grid(self.plan, self.settings, tuple(self.records), CODE)
        for block in blocks_in_turn(rounds, mine):
            mine += self.measured(block)
        self.records += mine
        return mine

    def measured(self, block: Block) -> list[RunRecord]:
        """Return the records of a block."""
        found: list[RunRecord] = []
        for position, entry in enumerate(block.entries):
            seconds = SCREENING_SECONDS if block.is_screening else RUN_SECONDS
            ratio = RATIOS.get(self.optimizer(entry.cell_id), 1.0)
            ratio /= 50 if entry.spec.precision.name == "O1" else 1
            begun = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now)
            facts = {"started_at": begun.isoformat(), "run_seconds": seconds}
            facts |= {"purpose": SCREENING} if block.is_screening else {"any_look": True}
            speed = 100 * ratio * self.noise(entry.cell_id)
            record = run(entry.cell_id, block.name, speed, environment=facts)
            record = replace(record, metrics={**record.metrics, "step_time_ms": 1e3 / ratio})
            record = replace(record, run_id=f"{self.now}", position=position)
            found += of_present_code(self.plan, [record])
            self.now += seconds
        return found


def test_blocks_go_to_what_is_undecided_and_the_time_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(4.0, monkeypatch)
    first = bench.command()
    assert bench.now <= 240
    assert bench.now > 240 - 4 * RUN_SECONDS
    screened = [r for r in first if r.is_screening]
    assert len(screened) == 4
    assert first[:4] == screened
    runs = Counter(bench.optimizer(r.cell_id) for r in first[4:])
    assert "sgd_loop" not in runs, "ten times slower: one screening run"
    assert 3 <= runs["adamw_foreach"] <= 6, "decided"
    assert runs["adamw_fused"] > 10
    begin = bench.now
    again = bench.command()
    assert {bench.optimizer(r.cell_id) for r in again} <= {"adamw_fused", "adamw_loop"}
    assert bench.now - begin <= 240


def test_a_command_whose_cells_are_all_decided_runs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(600.0, monkeypatch)
    bench.settings = replace(bench.settings, indifference=0.1)
    assert bench.command()
    assert bench.now < 600
    assert bench.command() == []


def test_cells_that_are_compared_with_no_other_get_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(600.0, monkeypatch, "resources.ranks_per_node=1,2", "sweep.baseline=null")
    runs = Counter(r.cell_id for r in bench.command() if not r.is_screening)
    assert [*runs.values()] == [5, 5]
    assert bench.command() == []


def test_no_screening_run_begins_that_will_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(0.06, monkeypatch)
    assert len(bench.command()) == 3, "of 4 screening runs of a second"
    assert bench.now <= 3.6


def test_a_budget_cuts_the_windows_of_its_runs() -> None:
    cells = expand([*TINY, "optimizer=adamw_fused", "measurement=standard"], composer())
    plan = within_minutes(plan_of(cells, LAPTOP, composer()), 0.1)
    assert {e.spec.measurement.for_screening().max_seconds for e in plan.runnable} == {0.25}
