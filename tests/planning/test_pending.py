"""Which cells of a command run: pairs are counted, not runs."""

from dataclasses import replace
from typing import Any

import pytest

from tests.builders import run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.planning.freeze import plan_of
from vitsweep.planning.pending import CellState, ResumeState, resume_state
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import RunRecord, Status

CODE: dict[str, Any] = {"git_commit": "0123abcd", "packages": {"torch": "2.13.0"}}
BLOCKS = [f"b{number}" for number in range(5)]


@pytest.fixture(scope="module")
def plan() -> SweepPlan:
    return plan_of(expand([*TINY, "sharding=fsdp,zero2"], composer()), LAPTOP, composer())


@pytest.fixture
def settings() -> SweepSettings:
    return sweep_settings(composer().compose().tree)


def measured(*cells: str) -> list[RunRecord]:
    """Every cell in every block."""
    return [run(cell, block, 100) for block in BLOCKS for cell in cells]


def but(runs: list[RunRecord], cell: str, block: str, status: Status) -> list[RunRecord]:
    """The same runs, one of which ended otherwise."""
    of_run = {"status": status, "metrics": {}, "reason": "SIGKILL"}
    return [
        replace(r, **of_run) if (r.cell_id, r.block) == (cell, block) else r  # type: ignore[arg-type]
        for r in runs
    ]


def missing(
    plan: SweepPlan, settings: SweepSettings, *runs: RunRecord, now: list[RunRecord] | None = None
) -> ResumeState:
    return resume_state(plan, runs, settings, CODE, now or [])


def test_nothing_is_missing_where_every_block_holds_the_pair(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    state = missing(plan, settings, *measured(*plan.entries))
    assert state.missing_blocks == {}
    assert {state.cell_state(e) for e in plan.entries.values()} == {CellState.measured}


def test_a_new_command_lacks_all_blocks_of_its_cells_and_lists_no_added_baseline(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    state = missing(plan, settings)
    assert state.missing_blocks == {fsdp: 5, zero2: 5}
    assert state.cell_state(plan.entries[baseline]) is CellState.runnable


@pytest.mark.parametrize("status", [Status.killed, Status.preempted])
def test_a_baseline_that_was_killed_once_leaves_each_cell_one_block_short(
    plan: SweepPlan, settings: SweepSettings, status: Status
) -> None:
    fsdp, zero2, baseline = plan.entries
    runs = but(measured(*plan.entries), baseline, "b2", status)
    assert missing(plan, settings, *runs).missing_blocks == {fsdp: 1, zero2: 1}


def test_a_cell_that_was_killed_once_lacks_one_block(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, _, _ = plan.entries
    runs = but(measured(*plan.entries), fsdp, "b2", Status.killed)
    assert missing(plan, settings, *runs).missing_blocks == {fsdp: 1}
    assert missing(plan, settings, *runs, run(fsdp, "b5")).missing_blocks == {fsdp: 1}, "no pair"


def test_runs_of_one_block_on_other_nodes_are_no_pair(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    on = {cell: {"nodes_used": "n1"} for cell in plan.entries}
    runs = [run(c, b, 100, environment=on[c]) for b in BLOCKS[:4] for c in plan.entries]
    last = [run(c, "b4", 100, environment=on[c]) for c in (zero2, baseline)]
    moved = run(fsdp, "b4", 100, environment={"nodes_used": "n2"})
    assert missing(plan, settings, *runs, *last, moved).missing_blocks == {fsdp: 1}


def test_cells_whose_baseline_cannot_be_measured_count_for_themselves(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    broken = run(baseline, "b0", status=Status.out_of_memory, reason="2 GiB")
    state = missing(plan, settings, *measured(fsdp), broken)
    assert state.missing_blocks == {zero2: 5}
    assert state.cell_state(plan.entries[baseline]) is CellState.not_measured
    assert state.reasons(plan.entries[baseline]) == ["out_of_memory: 2 GiB"]


@pytest.mark.parametrize("status", [Status.failed, Status.timed_out, Status.diverged])
def test_a_result_other_than_measured_is_repeated_on_request_only(
    plan: SweepPlan, settings: SweepSettings, status: Status
) -> None:
    fsdp, zero2, _ = plan.entries
    ended = run(fsdp, "b0", status=status, reason="why")
    assert missing(plan, settings, ended).missing_blocks == {zero2: 5}
    asked = replace(settings, retry=(str(status),))
    assert missing(plan, asked, ended).missing_blocks == {fsdp: 5, zero2: 5}


def test_runs_that_jobs_of_a_cluster_will_do_complete_pairs(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    runs = [r for r in measured(*plan.entries) if (r.cell_id, r.block) != (baseline, "b4")]
    assert missing(plan, settings, *runs).missing_blocks == {fsdp: 1, zero2: 1}
    state = resume_state(plan, runs, settings, CODE, pending=[(baseline, "b4")])
    assert state.missing_blocks == {}


def test_remeasuring_counts_the_runs_of_this_command_alone(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, _ = plan.entries
    anew = replace(settings, remeasure=True)
    runs = measured(*plan.entries)
    assert missing(plan, anew, *runs).missing_blocks == {fsdp: 5, zero2: 5}
    now = [run(cell, "new", 100) for cell in plan.entries]
    assert missing(plan, anew, *runs, now=now).missing_blocks == {fsdp: 4, zero2: 4}


def test_a_cell_that_fails_in_this_command_is_not_tried_again_by_it(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, _ = plan.entries
    now = [*[run(c, "b0") for c in plan.entries], run(fsdp, "b1", status=Status.failed)]
    state = missing(plan, settings, now=now)
    assert state.missing_blocks == {zero2: 4}
    assert missing(plan, settings, *now).missing_blocks == {fsdp: 4, zero2: 4}, "the next one does"


def test_three_kills_in_a_row_are_enough_for_one_command(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, _, _ = plan.entries
    killed = run(fsdp, "b0", status=Status.killed)
    between = run(fsdp, "b1")
    assert fsdp in missing(plan, settings, now=[killed, killed, between, killed]).missing_blocks
    state = missing(plan, settings, now=[between, killed, killed, killed])
    assert state.not_measured == {fsdp: killed}
    assert fsdp in missing(plan, settings, between, *[killed] * 3).missing_blocks


def test_a_cell_that_no_rule_allows_says_why(settings: SweepSettings) -> None:
    cells = expand([*TINY, "resources.ranks_per_node=2", "mesh.tensor=2"], composer())
    plan = plan_of(cells, LAPTOP, composer())
    [refused] = [e for e in plan.entries.values() if e.reasons]
    state = missing(plan, settings)
    assert state.cell_state(refused) is CellState.invalid
    assert "`mesh.tensor=2`" in state.reasons(refused)[0]
