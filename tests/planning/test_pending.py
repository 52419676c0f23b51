"""Which cells of a command run: pairs are counted, not runs."""

from dataclasses import replace
from typing import Any

import pytest

from tests.builders import of_present_code, run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.planning.pending import CellState, ResumeState, has_screening, resume_state
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.results.record import SCREENING, RunRecord, Status

TORCH = "2.13.0"
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
    """Runs that do not say otherwise are of the code as it is."""
    return resume_state(plan, of_present_code(plan, runs), settings, TORCH, now or [])


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
    state = resume_state(plan, by_code(plan, runs), settings, TORCH, pending=[(baseline, "b4")])
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


def by_code(plan: SweepPlan, runs: list[RunRecord], **code: str) -> list[RunRecord]:
    """The same runs as measured by a code: `other` for all cells, or the plan's own."""
    hashes = {cell: code.get("all", entry.code.hash) for cell, entry in plan.entries.items()}
    return [replace(r, environment=r.environment | {"code_hash": hashes[r.cell_id]}) for r in runs]


def test_runs_of_other_code_do_not_count_unless_accepted(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, _ = plan.entries
    own = by_code(plan, measured(*plan.entries))
    other = by_code(plan, measured(*plan.entries), all="0ther")
    assert missing(plan, settings, *own).missing_blocks == {}
    state = missing(plan, settings, *other)
    assert state.missing_blocks == {fsdp: 5, zero2: 5}
    assert set(state.changed_code) == set(plan.entries)
    accepting = replace(settings, accept_code="any")
    assert missing(plan, accepting, *other).missing_blocks == {}


def test_other_code_is_never_pooled_even_where_it_is_accepted(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, _ = plan.entries
    accepting = replace(settings, accept_code="any")
    half = [r for r in by_code(plan, measured(*plan.entries), all="0ther") if r.block < "b3"]
    rest = [r for r in by_code(plan, measured(*plan.entries)) if r.block >= "b3"]
    for mixed in (half, half + rest):
        lacking = missing(plan, accepting, *mixed).missing_blocks
        assert lacking == dict.fromkeys([fsdp, zero2], 5 if mixed is half else 3)


def test_a_pair_is_of_one_state_of_the_code(plan: SweepPlan, settings: SweepSettings) -> None:
    fsdp, zero2, baseline = plan.entries
    variants = by_code(plan, measured(fsdp, zero2))
    state = missing(plan, settings, *variants, *by_code(plan, measured(baseline), all="0ther"))
    assert state.missing_blocks == {fsdp: 5, zero2: 5}


def test_cells_without_a_code_hash_count_where_any_code_is_accepted(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, _ = plan.entries
    runs = by_code(plan, measured(*plan.entries), all="")
    assert missing(plan, settings, *runs).missing_blocks == {fsdp: 5, zero2: 5}
    assert missing(plan, replace(settings, accept_code="any"), *runs).missing_blocks == {}


def test_a_failure_of_other_code_says_nothing(plan: SweepPlan, settings: SweepSettings) -> None:
    fsdp, zero2, _ = plan.entries
    failed = run(fsdp, "b0", status=Status.failed, reason="bug")
    other = by_code(plan, [failed], all="0ther")
    assert missing(plan, settings, *other).missing_blocks == {fsdp: 5, zero2: 5}
    assert missing(plan, settings, *by_code(plan, [failed])).missing_blocks == {zero2: 5}


def wanting(plan: SweepPlan, **measurement: Any) -> SweepPlan:
    """The same cells, asked for by a command with other settings of the measurement."""
    return SweepPlan({
        cell: replace(e, spec=replace(e.spec, measurement=replace(e.spec.measurement, **measurement)))
        for cell, e in plan.entries.items()
    })  # fmt: skip


def test_a_command_that_wants_a_proof_measures_unproved_cells_again(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, _ = plan.entries
    unproved = [replace(r, validity=r.validity | {"proved": ""}) for r in measured(*plan.entries)]
    unproved = by_code(plan, unproved)
    assert missing(wanting(plan, prove="none"), settings, *unproved).missing_blocks == {}
    state = missing(wanting(plan, prove="twin"), settings, *unproved)
    assert state.missing_blocks == {fsdp: 5, zero2: 5}
    assert set(state.unproved) == set(plan.entries)


def test_the_reason_to_measure_again_is_the_proof_only_where_the_proof_is_all_that_lacks(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    edited = by_code(plan, measured(*plan.entries), all="0ther")
    unproved = [replace(r, validity=r.validity | {"proved": ""}) for r in measured(*plan.entries)]
    proved = measured(baseline)
    runs = [*edited, *by_code(plan, [*unproved, *proved])]
    state = missing(wanting(plan, prove="twin"), settings, *runs)
    assert state.missing_blocks == {fsdp: 5, zero2: 5}
    assert set(state.unproved) == {fsdp, zero2}, "the baseline has a proof, and runs beside them"
    assert state.changed_code == {}


def test_a_cell_known_to_be_wrong_stays_so_for_a_command_without_proof(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, *_ = plan.entries
    wrong = run(fsdp, "b9", status=Status.wrong, reason="twin", minute=59)
    runs = by_code(plan, [*measured(*plan.entries), wrong])
    state = missing(wanting(plan, prove="none"), settings, *runs)
    assert set(state.not_measured) == {fsdp}
    assert state.cell_state(plan.entries[fsdp]) is CellState.not_measured


def test_a_command_that_wants_a_trace_runs_a_cell_without_one_once(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    runs = by_code(plan, measured(*plan.entries))
    traced = wanting(plan, trace=True)
    assert missing(traced, settings, *runs).missing_blocks == {fsdp: 1, zero2: 1}
    now = [run(c, "b7", 100, **{"measurement.trace": True}) for c in (fsdp, zero2, baseline)]
    assert missing(traced, settings, *runs, now=by_code(plan, now)).missing_blocks == {}


def test_a_longer_time_limit_tries_a_cell_again(plan: SweepPlan, settings: SweepSettings) -> None:
    fsdp, *_ = plan.entries
    limit = {"measurement.timeout_min": 10.0}
    ended = by_code(plan, [run(fsdp, "b0", status=Status.timed_out, reason="10", **limit)])
    assert fsdp not in missing(wanting(plan, timeout_min=10.0), settings, *ended).missing_blocks
    assert fsdp in missing(wanting(plan, timeout_min=20.0), settings, *ended).missing_blocks


def test_a_longer_window_measures_again(plan: SweepPlan, settings: SweepSettings) -> None:
    fsdp, zero2, _ = plan.entries
    short = {"measurement.min_seconds": 0.5}
    runs = by_code(plan, [run(c, b, 100, **short) for b in BLOCKS for c in plan.entries])
    assert missing(wanting(plan, min_seconds=0.5), settings, *runs).missing_blocks == {}
    longer = missing(wanting(plan, min_seconds=9.0), settings, *runs)
    assert longer.missing_blocks == {fsdp: 5, zero2: 5}


def test_an_added_baseline_is_measured_where_its_own_cells_are(settings: SweepSettings) -> None:
    cells = expand([*TINY, "sharding=fsdp", "seed=1,2"], composer())
    plan = plan_of(cells, LAPTOP, composer())
    first, second, base1, base2 = plan.entries
    state = missing(plan, settings, *by_code(plan, measured(first, base1)))
    assert state.missing_blocks == {second: 5}
    states = {c: state.cell_state(e) for c, e in plan.entries.items()}
    assert states[base1] is CellState.measured
    assert states[base2] is CellState.runnable


def test_a_baseline_that_was_asked_for_lacks_its_own_blocks(settings: SweepSettings) -> None:
    plan = plan_of(expand([*TINY, "sharding=ddp,fsdp"], composer()), LAPTOP, composer())
    assert missing(plan, settings).missing_blocks == dict.fromkeys(plan.entries, 5)
    base, fast = plan.entries
    assert missing(plan, settings, *by_code(plan, measured(base))).missing_blocks == {fast: 5}
    assert missing(plan, settings, *by_code(plan, measured(fast))).missing_blocks == {
        base: 5,
        fast: 5,
    }


def screened(plan: SweepPlan, *speeds: float) -> list[RunRecord]:
    """One screening run of each cell; the baseline, last in the plan, at 100 img/s."""
    given = zip(plan.entries, [*speeds, 100.0], strict=True)
    return [
        run(cell, "screening", speed, environment={"purpose": SCREENING}) for cell, speed in given
    ]


def test_a_cell_whose_screening_run_is_slow_is_pruned(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    state = missing(plan, settings, *screened(plan, 3, 90))
    assert state.missing_blocks == {zero2: 5}
    assert state.slowdowns[fsdp] == pytest.approx(100 / 3)
    assert state.cell_state(plan.entries[fsdp]) is CellState.pruned
    of_this_command = missing(plan, settings, now=screened(plan, 3, 90))
    assert of_this_command.missing_blocks == {zero2: 5}
    all_slow = missing(plan, settings, *screened(plan, 3, 5))
    assert all_slow.missing_blocks == {}
    assert all_slow.cell_state(plan.entries[baseline]) is CellState.measured


def in_block(plan: SweepPlan, block: str, *speeds: float) -> list[RunRecord]:
    """One block; the baseline, last in the plan, at 100 img/s."""
    return [run(c, block, s) for c, s in zip(plan.entries, [*speeds, 100.0], strict=True)]


def test_without_screening_a_slow_cell_gets_no_second_block(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    fsdp, zero2, baseline = plan.entries
    settings = replace(settings, screening=False)
    assert missing(plan, settings).first == {fsdp, zero2, baseline}
    state = missing(plan, settings, now=in_block(plan, "b0", 3, 90))
    assert state.missing_blocks == {zero2: 4}
    assert state.cell_state(plan.entries[fsdp]) is CellState.pruned
    assert not state.first
    one_slow_block = in_block(plan, "b0", 30, 90) + in_block(plan, "b1", 3, 90)
    assert missing(plan, settings, now=one_slow_block).missing_blocks == {fsdp: 3, zero2: 3}
    assert (
        missing(plan, replace(settings, screening=True), now=in_block(plan, "b0", 3, 90)).slowdowns
        == {}
    )


def test_where_screening_comes_first_is_up_to_the_device_and_the_budget(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    entry = next(iter(plan.entries.values()))
    resources = replace(entry.spec.resources, device="cuda")
    on_gpu = replace(entry, spec=replace(entry.spec, resources=resources))
    assert has_screening(entry, settings)
    assert not has_screening(on_gpu, settings)
    assert has_screening(on_gpu, replace(settings, minutes=3.0))
    assert has_screening(on_gpu, replace(settings, screening=True))
    assert not has_screening(entry, replace(settings, screening=False))


def test_how_slow_a_cell_may_be_is_a_setting(plan: SweepPlan, settings: SweepSettings) -> None:
    found = screened(plan, 3, 90)
    for limit in (None, 50.0):
        assert set(
            missing(plan, replace(settings, prune_slowdown=limit), *found).missing_blocks
        ) == {cell for cell in plan.entries if plan.entries[cell].baseline_id != cell}


def test_a_typed_number_of_blocks_measures_a_slow_cell_in_full(settings: SweepSettings) -> None:
    typed = [*TINY, "sharding=fsdp,zero2", "measurement.blocks=5"]
    plan = plan_of(expand(typed, composer()), LAPTOP, composer())
    assert set(missing(plan, settings, *screened(plan, 3, 90)).missing_blocks.values()) == {5}


def test_screening_runs_count_for_nothing_else(plan: SweepPlan, settings: SweepSettings) -> None:
    fsdp, zero2, _ = plan.entries
    assert missing(plan, settings, *screened(plan, 80, 90)).missing_blocks == {fsdp: 5, zero2: 5}
    old = [
        replace(r, environment=r.environment | {"code_hash": "old"}) for r in screened(plan, 3, 90)
    ]
    state = resume_state(plan, old, settings, TORCH)
    assert state.missing_blocks == {fsdp: 5, zero2: 5}
    assert (state.slowdowns, state.changed_code) == ({}, {})


def test_a_run_that_time_cut_short_is_measured_again_for_a_longer_time_only(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    cut = [
        replace(
            r,
            validity=r.validity | {"short_window": True},
            spec=r.spec | {"measurement.max_seconds": 30.0},
        )
        for r in measured(*plan.entries)
    ]
    assert missing(wanting(plan, max_seconds=30.0), settings, *cut).missing_blocks == {}
    assert missing(wanting(plan, max_seconds=90.0), settings, *cut).missing_blocks


def test_who_asks_for_traced_steps_gets_new_blocks_of_cells_that_are_measured(
    plan: SweepPlan, settings: SweepSettings
) -> None:
    plain, asked = measured(*plan.entries), wanting(plan, traced_steps=3)
    assert missing(asked, settings, *plain).missing_blocks.keys() == plan.entries.keys() - {
        entry.baseline_id for entry in plan.entries.values()
    }
    traced = [replace(r, samples={"trace": {"rows": []}}) for r in plain]
    assert missing(asked, settings, *traced).missing_blocks == {}
    assert missing(plan, settings, *traced).missing_blocks == {}
