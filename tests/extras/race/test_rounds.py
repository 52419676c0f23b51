"""A race over real cells whose runs are simulated: to the end, interrupted anywhere, within a budget."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from pandas import DataFrame
from scipy import stats

from tests.builders import of_present_code, run
from tests.cells import LAPTOP, TINY, composer
from tests.said import opening
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.extras.race import rounds as rounds_module
from vitsweep.extras.race.rounds import RaceRounds
from vitsweep.extras.race.table import RACE, race_lines, race_table, read_race
from vitsweep.planning.blocks import Block
from vitsweep.planning.pending import resume_state
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.results.record import FRESH, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import speedup_over

CODE = {"packages": {"torch": "2.13.0"}}
TORCH = CODE["packages"]["torch"]
GRID = (
    "precision=fp32,O1",
    "optimizer=adamw_loop,adamw_foreach,adamw_fused",
    "memory=keep_all,recompute_blocks",
)
BEST = ("O1", "adamw_fused", "keep_all")
RUN_SECONDS = 6.0


def planned(*overrides: str) -> tuple[SweepPlan, SweepSettings]:
    cells = expand([*TINY, "sweep.search=race", *overrides], composer())
    settings = sweep_settings(cells[0].tree)
    return plan_of(cells, LAPTOP, composer()), settings


@pytest.fixture(scope="module")
def grid() -> tuple[SweepPlan, SweepSettings]:
    return planned(*GRID)


class Machine:
    """Measures blocks: O1 is 20 % faster, fused 10 %, recomputation costs 15 %."""

    def __init__(
        self, plan: SweepPlan, outcome: Callable[[RunRecord], RunRecord] = lambda r: r
    ) -> None:
        self.plan, self.outcome, self.random = plan, outcome, np.random.default_rng(0)
        self.records: list[RunRecord] = []
        self.ended: set[str] = set()

    def measure(self, block: Block) -> None:
        for position, entry in enumerate(block.entries):
            self.measure_one(block, position, entry.cell_id)

    def measure_one(self, block: Block, position: int, cell_id: str) -> None:
        if cell_id in self.ended:  # as the block runner does
            return
        choices = self.plan.entries[cell_id].composed.choices
        log = 0.18 * (choices["precision"] == "O1") + 0.1 * (choices["optimizer"] == "adamw_fused")
        log -= 0.16 * (choices["memory"] == "recompute_blocks")
        log += self.random.normal(0, 0.02)
        started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(
            seconds=RUN_SECONDS * len(self.records)
        )
        facts = {"started_at": started.isoformat(), "run_seconds": RUN_SECONDS}
        facts |= {"purpose": block.purpose}
        record = run(cell_id, block.name, 100 * float(np.exp(log)), environment=facts)
        record = replace(record, run_id=f"{block.name}-{len(self.records)}", position=position)
        [record] = of_present_code(self.plan, [self.outcome(record)])
        if record.status != Status.measured:
            self.ended.add(cell_id)
        self.records.append(record)


def rounds_of(
    grid: tuple[SweepPlan, SweepSettings], folder: Path, earlier: Sequence[RunRecord] = ()
) -> RaceRounds:
    return RaceRounds(grid[0], grid[1], Store(folder).create(), CODE, tuple(earlier))


def finish(rounds: RaceRounds, machine: Machine) -> list[Block]:
    """Run a race to its end; return the blocks of this command."""
    done, before = [], len(machine.records)
    while blocks := rounds.next(machine.records[before:]):
        for block in blocks:
            machine.measure(block)
            done.append(block)
    return done


def choices_of(plan: SweepPlan, cell_id: str) -> tuple[str, ...]:
    found = plan.entries[cell_id].composed.choices
    return found["precision"], found["optimizer"], found["memory"]


@pytest.mark.smoke
def test_a_race_ends_with_the_best_cell_and_tells_what_became_of_the_others(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine, rounds = Machine(grid[0]), rounds_of(grid, tmp_path)
    rounds.check()
    blocks = finish(rounds, machine)
    race = read_race(tmp_path)
    assert race["ended"] == "halved"
    assert choices_of(grid[0], race["leader"]) == BEST
    assert choices_of(grid[0], race["baseline"]) == ("fp32", "adamw_loop", "keep_all")
    assert [sum("dropped_after" in c for c in race["cells"]), len(race["cells"])] == [8, 12]
    assert race["num_runs"] == len(machine.records) < race["grid_runs"]
    assert all(race["baseline"] in {e.cell_id for e in b.entries} for b in blocks)
    assert [len(b.entries) for b in blocks if b.purpose == FRESH] == [3] * 5
    table = race_table(race)
    assert table["state"].tolist() == [
        "leader",
        "runner-up",
        *["in the race"] * 2,
        *["dropped"] * 8,
    ]
    sure, answer = sorted(race_lines(race), key=lambda line: "in throughput: " in line)
    assert "in throughput: 1." in answer
    assert "5 fresh blocks" in answer
    assert sure.startswith("Settled:") == (race["open"] == [])
    assert "grid of 5 blocks" in sure


def test_runs_that_choose_support_no_claim(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine = Machine(grid[0])
    finish(rounds_of(grid, tmp_path), machine)
    race = read_race(tmp_path)
    rows = DataFrame([record.row() for record in machine.records])
    cells = speedup_over(rows, grid[0].baselines).set_index("cell_id")
    chosen = [race["leader"], race["runner_up"], race["baseline"]]
    assert set(cells.loc[[c for c in cells.index if c not in chosen], "claim"]) == {"screened"}
    assert cells.loc[race["leader"], "num_blocks"] == 5
    own = race["confirmed"][race["baseline"]]
    assert own["speedup"] == pytest.approx(cells.loc[race["leader"], "speedup"])
    dropped = next(c["cell_id"] for c in race["cells"] if "dropped_after" in c)
    assert opening("screened", about="") in cells.loc[dropped, "speedup_note"]
    state = resume_state(grid[0], machine.records, replace(grid[1], search="grid"), TORCH)
    assert state.missing_blocks[dropped] == 5, "a grid measures it in blocks of its own"


def test_the_ratios_are_those_of_students_t_at_the_levels_of_holm(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine = Machine(grid[0])
    finish(rounds_of(grid, tmp_path), machine)
    race = read_race(tmp_path)
    fresh = [r for r in machine.records if r.purpose == FRESH]
    speed = {(r.block, r.cell_id): np.log(r.metrics["images_per_second"]) for r in fresh}  # type: ignore[arg-type]
    levels = []
    for other, found in race["confirmed"].items():
        logs = [speed[b, race["leader"]] - speed[b, other] for b in {r.block for r in fresh}]
        half = np.log(found["speedup_high"] / found["speedup"]) / (
            np.std(logs, ddof=1) / np.sqrt(5)
        )
        levels.append(2 * stats.t.sf(half, 4))
    assert sorted(levels) in (pytest.approx([0.025, 0.05]), pytest.approx([0.025, 0.025]))


def test_fresh_blocks_measure_the_leader_and_never_choose_again(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine, rounds = Machine(grid[0]), rounds_of(grid, tmp_path)
    while not rounds.ended:
        blocks = rounds.next(machine.records)
        if not rounds.ended:
            for block in blocks:
                machine.measure(block)
    chosen = read_race(tmp_path)["leader"]
    machine.outcome = lambda record: (  # the leader turns out to be slow
        replace(record, metrics={**record.metrics, "images_per_second": 50.0})
        if record.cell_id == chosen
        else record
    )
    fresh = 0
    while blocks:
        fresh += len(blocks)
        for block in blocks:
            assert {chosen, read_race(tmp_path)["runner_up"]} <= {e.cell_id for e in block.entries}
            machine.measure(block)
        blocks = rounds.next(machine.records)
    race = read_race(tmp_path)
    assert fresh == grid[1].confirm == 5
    assert race["leader"] == chosen
    confirmed = race["confirmed"][race["baseline"]]
    assert confirmed["num_blocks"] == 5
    assert confirmed["speedup_high"] < 0.6
    (tmp_path / RACE).unlink()  # the records say which runs chose and which are fresh
    again = rounds_of(grid, tmp_path, machine.records)
    assert again.next(()) == []
    assert read_race(tmp_path)["leader"] == chosen
    assert read_race(tmp_path)["confirmed"][race["baseline"]] == confirmed


def test_a_race_killed_at_random_moments_twenty_times_loses_nothing_and_ends_the_same(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    whole = Machine(grid[0])
    finish(rounds_of(grid, tmp_path / "whole"), whole)
    moments = np.random.default_rng(4)
    machine = Machine(grid[0])
    for _ in range(20):
        rounds, before = rounds_of(grid, tmp_path / "killed", machine.records), len(machine.records)
        runs_left = int(moments.integers(1, 9))
        while runs_left and (blocks := rounds.next(machine.records[before:])):
            for block in blocks:
                for position, entry in enumerate(block.entries):
                    if runs_left:
                        machine.measure_one(block, position, entry.cell_id)
                        runs_left -= 1
    kept = list(machine.records)
    finish(rounds_of(grid, tmp_path / "killed", kept), machine)
    assert machine.records[: len(kept)] == kept
    ends = [read_race(tmp_path / name) for name in ("whole", "killed")]
    assert [end["ended"] for end in ends] == ["halved", "halved"]
    assert ends[0]["leader"] == ends[1]["leader"]
    assert ends[1]["confirmed"][ends[1]["baseline"]]["num_blocks"] >= 5
    assert ends[1]["num_runs"] == len(machine.records)


def test_kills_in_fresh_blocks_do_not_use_up_the_confirmation(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine, rounds = Machine(grid[0]), rounds_of(grid, tmp_path)
    while not rounds.ended:
        blocks = rounds.next(machine.records)
        for block in blocks if not rounds.ended else ():
            machine.measure(block)
    for _ in range(8):
        [block] = rounds_of(grid, tmp_path, machine.records).next(())
        machine.measure_one(block, 0, block.entries[0].cell_id)  # and then the command is killed
    finish(rounds_of(grid, tmp_path, list(machine.records)), machine)
    race = read_race(tmp_path)
    assert race["confirmed"][race["baseline"]]["num_blocks"] >= 5


def test_cells_that_fail_or_need_too_much_memory_leave_with_their_reason(tmp_path: Path) -> None:
    plan, settings = planned(*GRID, "sweep.memory_limit_gib=2")

    def outcome(record: RunRecord) -> RunRecord:
        choices = plan.entries[record.cell_id].composed.choices
        if choices["optimizer"] == "adamw_foreach":
            return replace(record, status=Status.failed, reason="KeyError: x", metrics={})
        peak = 3.0 if choices["precision"] == "O1" else 1.0
        return replace(record, metrics={**record.metrics, "peak_rss_gib": peak})

    machine = Machine(plan, outcome)
    finish(rounds_of((plan, settings), tmp_path), machine)
    race = read_race(tmp_path)
    assert choices_of(plan, race["leader"]) == ("fp32", "adamw_fused", "keep_all")
    reasons = {c["cell_id"]: c["reason"] for c in race["cells"] if "reason" in c}
    assert {r.split(",")[0] for r in reasons.values()} == {"failed: KeyError: x", "used 3 GiB"}
    counts = [record.cell_id for record in machine.records]
    assert all(counts.count(cell) <= 2 for cell, why in reasons.items() if "failed" in why)


def test_throughput_per_cost_divides_by_the_ranks(tmp_path: Path) -> None:
    cells = ("resources.ranks_per_node=1,2", "optimizer=adamw_loop,adamw_foreach")
    plan, settings = planned(*cells, "sweep.rank_by=throughput_per_cost")
    machine = Machine(plan)
    finish(rounds_of((plan, settings), tmp_path), machine)
    leader = plan.entries[read_race(tmp_path)["leader"]]
    assert leader.spec.resources.ranks_per_node == 1


def test_a_race_of_one_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=r"`sweep\.search=race`"):
        rounds_of(planned(), tmp_path).check()


def test_choices_that_change_the_model_are_refused_where_the_model_is_kept(tmp_path: Path) -> None:
    kept = planned("classifier=token,pooled", "sweep.keep_model=true")
    [refused] = [entry for entry in kept[0].entries.values() if entry.reasons]
    assert "`classifier=pooled`" in refused.reasons[0]
    assert "1 of 2 cells" in rounds_of(kept, tmp_path).notice
    assert rounds_of(planned("classifier=token,pooled"), tmp_path).notice == ""


def test_a_race_of_which_every_cell_is_refused_names_the_reasons(tmp_path: Path) -> None:
    refused = planned("attention=sdpa_cudnn", "precision=fp32,O1")
    with pytest.raises(ImpossibleCellError, match=r"\n.*sdpa_cudnn"):
        rounds_of(refused, tmp_path).check()


def test_everything_is_a_race_that_keeps_the_model() -> None:
    settings = sweep_settings(composer().compose(["+sweep=everything"]).tree)
    assert (settings.search, settings.keep_model) == ("race", True)


def test_a_budget_that_ends_before_every_cell_ran_settles_nothing_and_a_larger_one_goes_on(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, settings = grid
    machine = Machine(plan)
    monkeypatch.setattr(rounds_module.time, "monotonic", lambda: RUN_SECONDS * len(machine.records))
    for minutes, ended in ((1.0, "budget"), (600.0, "halved")):
        small = (plan, replace(settings, minutes=minutes, confirm=1))
        finish(rounds_of(small, tmp_path, list(machine.records)), machine)
        race = read_race(tmp_path)
        assert race["ended"] == ended
        if ended == "budget":
            assert len(machine.records) == 7 + 3, "the first block, and a fresh one"
            assert len(race["open"]) == 11
            assert "Not settled: 11 other cells" in race_lines(race)[1]
            assert "5 never ran" in race_lines(race)[1]
    assert choices_of(plan, race["leader"]) == BEST


def test_a_race_that_is_stopped_tells_of_the_runs_it_has(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine, rounds = Machine(grid[0]), rounds_of(grid, tmp_path)
    assert race_lines({"cells": []}) == [say("nothing_measured", why="nothing ran")]
    machine.measure(rounds.next(())[0])
    rounds.stopped(machine.records)
    race = read_race(tmp_path)
    assert (race["ended"], race["num_runs"], race["num_blocks"]) == ("", 7, 1)
    assert race["leader"] in {record.cell_id for record in machine.records}
    assert not [cell for cell in race["cells"] if "dropped_after" in cell], "from one run of each"
    assert race_lines(race)[1].startswith("Not settled")
    assert "may lead in throughput: no claim" in race_lines(race)[0]


def test_a_race_in_which_no_cell_keeps_the_limit_says_so(tmp_path: Path) -> None:
    plan, settings = planned(*GRID, "sweep.memory_limit_gib=0.1")
    machine = Machine(plan, lambda r: replace(r, metrics={**r.metrics, "peak_rss_gib": 0.4}))
    finish(rounds_of((plan, settings), tmp_path), machine)
    [told] = race_lines(read_race(tmp_path))
    assert "used 0.4 GiB, more than sweep.memory_limit_gib=0.1" in told


def test_blocks_that_bring_no_run_are_not_asked_for_without_end(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    rounds = rounds_of(grid, tmp_path)
    assert [bool(rounds.next(())) for _ in range(6)] == [True] * 4 + [False] * 2


def test_plan_says_how_a_race_would_proceed(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    told = rounds_of((grid[0], replace(grid[1], minutes=30.0)), tmp_path).outlook
    assert re.match(r"Race of 12 cells .* 8 runs for 30 min", told)
    assert "5 fresh blocks" in told
    assert re.search("5 blocks .*65 runs", told)
