"""A race over real cells whose runs are simulated: to the end, interrupted anywhere, within a budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.builders import of_present_code, run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError, ImpossibleCellError
from vitsweep.planning.blocks import Block
from vitsweep.planning.freeze import plan_of
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.racing.rounds import RaceRounds, describe_race
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import RACE, read_race
from vitsweep.tables.race import race_answer, race_lines, race_table

CODE = {"packages": {"torch": "2.13.0"}}
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


def test_a_race_ends_with_the_best_cell_and_tells_what_became_of_the_others(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine, rounds = Machine(grid[0]), rounds_of(grid, tmp_path)
    rounds.check()
    blocks = finish(rounds, machine)
    race = read_race(tmp_path)
    assert race["ended"] == "settled"
    assert choices_of(grid[0], race["leader"]) == BEST
    assert choices_of(grid[0], race["baseline"]) == ("fp32", "adamw_loop", "keep_all")
    dropped = [cell for cell in race["cells"] if "dropped_after" in cell]
    assert len(dropped) >= 6
    assert all(1 <= cell["dropped_after"] <= race["num_blocks"] for cell in dropped)
    assert race["num_runs"] == len(machine.records)
    choosing = [block for block in blocks if len(block.entries) > 3]  # the others confirm
    assert sum(len(block.entries) for block in choosing) < race["grid_runs"]
    assert all(race["baseline"] in {e.cell_id for e in b.entries} for b in blocks)


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
    assert [end["ended"] for end in ends] == ["settled", "settled"]
    assert ends[0]["leader"] == ends[1]["leader"]
    assert ends[1]["confirmed"][ends[1]["baseline"]]["num_blocks"] >= 5
    assert ends[1]["num_runs"] == len(machine.records)


def test_a_budget_ends_a_race_unsettled_and_a_larger_one_continues_it(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    plan, settings = grid
    small = (plan, replace(settings, minutes=2.4, confirm=1))
    machine = Machine(plan)
    rounds = rounds_of(small, tmp_path)
    finish(rounds, machine)
    assert read_race(tmp_path)["ended"] == "budget"
    assert read_race(tmp_path)["seconds"] <= 60 * 2.4
    spent = len(machine.records)
    assert spent >= 14
    finish(rounds_of((plan, replace(settings, minutes=600.0)), tmp_path, machine.records), machine)
    assert read_race(tmp_path)["ended"] == "settled"
    assert len(machine.records) > spent


def test_a_race_whose_hours_are_spent_shows_its_result_again(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    plan, settings = grid
    small = (plan, replace(settings, max_gpu_hours=0.01, confirm=1))  # runs are longer than assumed
    machine = Machine(plan)
    finish(rounds_of(small, tmp_path), machine)
    before, spent = read_race(tmp_path), len(machine.records)
    assert before["ended"] == "budget"
    again = rounds_of(small, tmp_path, machine.records)
    again.check()
    assert finish(again, machine) == []
    assert len(machine.records) == spent
    assert read_race(tmp_path)["leader"] == before["leader"]
    assert any("more than `sweep.max_gpu_hours=0.01`" in line for line in race_lines(before))
    assert "has to be larger then" in race_lines(before)[0]


def test_the_minutes_of_a_race_are_those_of_each_command(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    plan, settings = grid
    small = (plan, replace(settings, minutes=2.4, confirm=0))
    machine, spent = Machine(plan), [0]
    for _ in range(3):
        finish(rounds_of(small, tmp_path, list(machine.records)), machine)
        spent.append(len(machine.records))
        assert read_race(tmp_path)["seconds"] <= len(spent[1:]) * 60 * 2.4
    assert min(np.diff(spent)) >= 8


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


def test_a_race_in_which_no_cell_keeps_the_limit_says_so(tmp_path: Path) -> None:
    plan, settings = planned(*GRID, "sweep.memory_limit_gib=0.1")

    def outcome(record: RunRecord) -> RunRecord:
        return replace(record, metrics={**record.metrics, "peak_rss_gib": 0.4})

    machine = Machine(plan, outcome)
    finish(rounds_of((plan, settings), tmp_path), machine)
    race = read_race(tmp_path)
    answer = race_answer(race)
    assert answer.startswith("The race has no result: every cell is out (")
    assert "used 0.4 GiB, more than sweep.memory_limit_gib=0.1" in answer
    assert race_lines(race)[0].startswith("No cell is left that can be measured")


def test_throughput_per_cost_divides_by_the_ranks(tmp_path: Path) -> None:
    cells = ("resources.ranks_per_node=1,2", "optimizer=adamw_loop,adamw_foreach")
    plan, settings = planned(*cells, "sweep.objective=throughput_per_cost")
    machine = Machine(plan)
    finish(rounds_of((plan, settings), tmp_path), machine)
    leader = plan.entries[read_race(tmp_path)["leader"]]
    assert leader.spec.resources.ranks_per_node == 1


def test_a_race_of_one_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="has one cell: a race needs two cells or more"):
        rounds_of(planned(), tmp_path).check()


def test_a_budget_that_is_too_small_for_one_block_is_refused(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    small = (grid[0], replace(grid[1], minutes=0.01))
    with pytest.raises(
        BadValueError, match=r"`sweep.minutes=0.01` is too small for one block: 8 runs"
    ):
        rounds_of(small, tmp_path).check()


def test_plan_says_how_a_race_would_proceed_and_what_it_costs_at_most(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    told = describe_race(rounds_of(grid, tmp_path))
    assert told.startswith(
        "Race of 12 cells in blocks of up to 8 runs: first 4 that cover cells at random"
    )
    assert "at most 65 runs, as many as the full grid takes" in told
    assert "5 fresh blocks of leader, baseline and runner-up" in told
    assert "a full one of 5 blocks takes 65 runs" in told
    bounded = rounds_of((grid[0], replace(grid[1], minutes=30.0)), tmp_path)
    assert "as many blocks as sweep.minutes=30 allows" in describe_race(bounded)


def test_choices_that_change_the_model_are_refused_where_the_model_is_kept(tmp_path: Path) -> None:
    kept = planned("classifier=token,pooled", "sweep.keep_model=true")
    [refused] = [entry for entry in kept[0].entries.values() if entry.reasons]
    assert "`classifier=pooled` changes what the model computes" in refused.reasons[0]
    assert "1 of 2 cells cannot run and are not in the race" in rounds_of(kept, tmp_path).notice
    assert rounds_of(planned("classifier=token,pooled"), tmp_path).notice == ""


def test_a_race_of_which_every_cell_is_refused_names_the_reasons(tmp_path: Path) -> None:
    refused = planned("attention=sdpa_cudnn", "precision=fp32,O1")
    with pytest.raises(ImpossibleCellError, match=r"None of the cells can run:\n.*sdpa_cudnn"):
        rounds_of(refused, tmp_path).check()


def test_everything_is_a_race_that_keeps_the_model() -> None:
    settings = sweep_settings(composer().compose(["+sweep=everything"]).tree)
    assert (settings.search, settings.keep_model) == ("race", True)


def test_a_race_that_is_stopped_within_its_start_tells_of_the_runs_it_has(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine, rounds = Machine(grid[0]), rounds_of(grid, tmp_path)
    machine.measure(rounds.next(())[0])
    rounds.stopped(machine.records)
    race = read_race(tmp_path)
    assert (race["ended"], race["num_runs"], race["num_blocks"]) == ("", 8, 1)
    assert race["leader"] in {record.cell_id for record in machine.records}
    assert not [cell for cell in race["cells"] if "dropped_after" in cell], "from one run of each"
    assert race_table(race)["to_leader"].isna().all()
    assert "1 of its 4 blocks are measured, too few to drop a cell" in race_lines(race)[0]
    assert len(race_lines(race)) == 2, "how it ended and its cost, nothing of the model"


def test_fresh_blocks_choose_nothing_even_where_the_budget_ends_within_the_start(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    machine = Machine(grid[0])
    rounds = rounds_of((grid[0], replace(grid[1], minutes=1.0, confirm=3)), tmp_path)
    for block in rounds.next(()):
        machine.measure(block)
    rounds.next(machine.records)
    chosen = read_race(tmp_path)
    assert (chosen["ended"], chosen["num_blocks"]) == ("budget", 1)
    machine.outcome = lambda record: (
        replace(record, metrics={**record.metrics, "images_per_second": 10.0})
        if record.cell_id == chosen["leader"]
        else record
    )
    finish(rounds_of((grid[0], rounds.settings), tmp_path, machine.records), machine)
    assert read_race(tmp_path)["leader"] == chosen["leader"]


def test_a_race_for_a_front_keeps_a_lean_cell_beside_a_fast_one(tmp_path: Path) -> None:
    plan, settings = planned(*GRID, "sweep.objective=[throughput,peak_memory]")

    def outcome(record: RunRecord) -> RunRecord:
        choices = plan.entries[record.cell_id].composed.choices
        peak = 1.0 if choices["memory"] == "recompute_blocks" else 2.0
        return replace(record, metrics={**record.metrics, "peak_rss_gib": peak})

    machine = Machine(plan, outcome)
    told = describe_race(rounds_of((plan, settings), tmp_path))
    assert "5 fresh blocks of the front and its baseline" in told
    finish(rounds_of((plan, settings), tmp_path), machine)
    race = read_race(tmp_path)
    assert race["ended"] == "settled"
    lean = ("O1", "adamw_fused", "recompute_blocks")
    assert [choices_of(plan, cell) for cell in race["front"]] == [BEST, lean]
    confirmed = race["confirmed"][race["front"][1]]
    assert confirmed["num_blocks"] == 5
    assert confirmed["memory"] == pytest.approx(0.5)
    dropped = {c["cell_id"] for c in race["cells"] if "dropped_after" in c}
    assert dropped
    assert not dropped & set(race["front"])
    assert len(machine.records) < race["grid_runs"] + 15
    again = rounds_of((plan, settings), tmp_path, machine.records)
    assert again.next(()) == []
    assert read_race(tmp_path)["front"] == race["front"]


TRAINING = ("task=train", "recipe=digits", "task.target_accuracy=0.9", "sweep.confirm=2")


def test_a_race_for_the_time_to_an_accuracy_drops_what_does_not_reach_it(tmp_path: Path) -> None:
    plan, settings = planned(*GRID, *TRAINING, "sweep.objective=time_to_accuracy")

    def outcome(record: RunRecord) -> RunRecord:
        seconds = 1e4 / record.metrics["images_per_second"]  # type: ignore[operator]
        is_half = plan.entries[record.cell_id].composed.choices["precision"] == "O1"
        reached = {"seconds_to_target": None if is_half else seconds, "accuracy_top1": 0.85}
        return replace(record, metrics={**record.metrics, **reached})

    machine = Machine(plan, outcome)
    finish(rounds_of((plan, settings), tmp_path), machine)
    race = read_race(tmp_path)
    assert choices_of(plan, race["leader"]) == ("fp32", "adamw_fused", "keep_all")
    reasons = [c["reason"] for c in race["cells"] if "reason" in c]
    assert len(reasons) >= 3
    assert all("did not reach task.target_accuracy=" in reason for reason in reasons)
    assert all(reason.endswith("0.8500 at the end") for reason in reasons)


def test_the_time_to_an_accuracy_needs_an_accuracy(tmp_path: Path) -> None:
    for overrides in (GRID, (*GRID, "task=train", "recipe=digits")):
        rounds = rounds_of(planned(*overrides, "sweep.objective=time_to_accuracy"), tmp_path)
        with pytest.raises(BadValueError, match=r"needs `task=train` and an accuracy to reach"):
            rounds.check()


def test_blocks_take_turns_with_the_seeds_and_seeds_are_no_cells_of_their_own(
    tmp_path: Path,
) -> None:
    plan, settings = planned(*GRID, "seed=0,1,2", "sweep.replicate=seed", "sweep.confirm=3")
    machine, rounds = Machine(plan), rounds_of((plan, settings), tmp_path)
    blocks = finish(rounds, machine)
    seeds = [{entry.spec.seed for entry in block.entries} for block in blocks]
    assert all(len(some) == 1 for some in seeds)
    assert {seed for some in seeds for seed in some} == {0, 1, 2}
    race = read_race(tmp_path)
    assert len(race["cells"]) == 12
    assert not any("seed" in cell["name"] for cell in race["cells"])
    assert choices_of(plan, race["leader"]) == BEST
    assert race["confirmed"][race["baseline"]]["num_blocks"] == 3
    assert rounds_of((plan, settings), tmp_path, machine.records).next(()) == []


def test_device_hours_are_a_budget_too(tmp_path: Path) -> None:
    plan, settings = planned(*GRID, "resources.ranks_per_node=2", "sweep.max_gpu_hours=0.1")
    machine, rounds = Machine(plan), rounds_of((plan, settings), tmp_path)
    assert "as many blocks as sweep.max_gpu_hours=0.1 allows" in describe_race(rounds)
    finish(rounds, machine)
    race = read_race(tmp_path)
    assert race["budget"] == "sweep.max_gpu_hours=0.1"
    assert race["seconds"] <= 0.1 * 3600 / 2
    with pytest.raises(BadValueError, match=r"`sweep.max_gpu_hours=0.001` is too small for one"):
        rounds_of((plan, replace(settings, max_gpu_hours=0.001)), tmp_path / "none").check()


def test_a_race_keeps_the_predictions_with_which_it_began(
    grid: tuple[SweepPlan, SweepSettings], tmp_path: Path
) -> None:
    plan, settings = grid
    predicted = {cell_id: float(number) for number, cell_id in enumerate(plan.entries)}
    store = Store(tmp_path).create()
    begun = RaceRounds(plan, settings, store, CODE, predicted=predicted)
    plain = rounds_of(grid, tmp_path / "plain")
    assert begun.race.design.num_main == plain.race.design.num_main + 1
    begun.next(())
    resumed = RaceRounds(plan, settings, store, CODE)
    assert resumed.race.design.predicted is not None
    assert resumed.predicted == predicted
    plain.next(())  # began without predictions, and goes on without those that came later
    later = RaceRounds(plan, settings, plain.store, CODE, predicted=predicted)
    assert later.predicted == {}
