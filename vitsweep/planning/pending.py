"""Why a cell runs, or does not: what the records of a sweep folder say about the cells of a command.

A cell of a command is, in this order,

1. `invalid`: a rule refuses it, and `PlannedCell.reasons` says why;
2. `not measured`: its latest run ended as `failed`, `out_of_memory`, `diverged`, ... and it never was
   measured: it would end the same way again, so it is repeated only on request (`sweep.retry`,
   `vitsweep retry`). A run that was killed or preempted says nothing about its cell and is repeated;
3. `measured`: it has as many blocks as `measurement.blocks` asks for;
4. `runnable`: it lacks some blocks.

What counts is pairs, not runs: a block counts for a cell if both the cell and its baseline were
measured in it, because only then the block yields a ratio. A baseline that was killed in one block
therefore leaves every cell of that block one block short.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import SCHEMA_VERSION, STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.tables.ratios import share_nodes

KILLS_IN_A_ROW = 3
"""A cell that was killed so often in a row is not tried again by the same command."""

MeasuredBlocks = dict[str, dict[str, Any]]
"""Cell id -> block -> nodes on which the cell was measured in that block, None where unknown."""


class CellState(StrEnum):
    """What a command does with a cell."""

    runnable = "runnable"
    invalid = "invalid"
    measured = "measured"
    not_measured = "not measured"


@dataclass(frozen=True)
class ResumeState:
    """What is measured already, and what a command therefore still has to run.

    Attributes:
        missing_blocks: cell id -> blocks that it lacks, at least 1. Baselines that the command does
            not name run in the blocks of the cells that need them and are not listed.
        not_measured: cell id -> its latest run, of cells that are not repeated.
        other_code: cells measured by another state of the code, which count nevertheless.
    """

    missing_blocks: dict[str, int]
    not_measured: dict[str, RunRecord]
    other_code: tuple[str, ...]

    def cell_state(self, entry: PlannedCell) -> CellState:
        """Return what the command does with a cell."""
        if entry.reasons:
            return CellState.invalid
        if entry.cell_id in self.not_measured:
            return CellState.not_measured
        if entry.cell_id in self.missing_blocks:
            return CellState.runnable
        if entry.is_added_baseline and self.missing_blocks:
            return CellState.runnable
        return CellState.measured

    def reasons(self, entry: PlannedCell) -> list[str]:
        """Return why a cell is not run; empty where it is, or where it is measured."""
        if run := self.not_measured.get(entry.cell_id):
            return [f"{run.status}: {run.reason}"]
        return list(entry.reasons)


def resume_state(
    plan: SweepPlan,
    runs: Iterable[RunRecord],
    settings: SweepSettings,
    code: Mapping[str, Any],
    of_this_command: Sequence[RunRecord] = (),
    pending: Iterable[tuple[str, str]] = (),
) -> ResumeState:
    """Compare a command with what is measured.

    A run counts if cell, device type, torch's minor version and schema are the same.

    Args:
        plan: the cells of the command.
        runs: records that were in the store when the command began, oldest first for each cell.
        settings: of the sweep; with `remeasure` none of `runs` counts, and cells that ended with a
            status in `retry` run again.
        code: state of the code that would measure now, see `provenance.code_state`.
        of_this_command: records that the command itself has added since, oldest first. A cell that
            was not measured in one of them is not tried again, unless something from outside stopped
            the run; that is repeated until it happens `KILLS_IN_A_ROW` times in a row.
        pending: (cell id, block) of runs that jobs of a cluster will still do; they count as measured.
    """
    torch_version = code["packages"]["torch"]
    before = [] if settings.remeasure else _usable(runs, plan, torch_version)
    now = _usable(of_this_command, plan, torch_version)
    measured = _measured_blocks([*before, *now])
    for cell_id, block in pending:
        measured.setdefault(cell_id, {}).setdefault(block, None)
    latest = {run.cell_id: run for run in before}
    repeated = (*STOPPED_FROM_OUTSIDE, Status.measured, *settings.retry)
    not_measured = {
        cell_id: run
        for cell_id, run in latest.items()
        if run.status not in repeated and cell_id not in measured
    } | _given_up(now)
    other = (run.cell_id for run in before if _of_other_code(run, code))
    missing = {
        entry.cell_id: lacking
        for entry in plan.runnable
        if entry.cell_id not in not_measured
        and not (entry.is_added_baseline and _is_needed_beside_others(entry, plan))
        and (lacking := _num_missing(entry, plan, measured, not_measured)) > 0
    }
    return ResumeState(missing, not_measured, tuple(dict.fromkeys(other)))


def comparable(run: RunRecord, entry: PlannedCell, torch_version: str) -> bool:
    """Tell whether a run may stand for the cell of a command."""
    of_run = str(run.environment.get("torch") or torch_version)
    return (
        run.schema_version == SCHEMA_VERSION
        and run.environment.get("device_type", entry.spec.resources.device)
        == entry.spec.resources.device
        and of_run.split(".")[:2] == torch_version.split(".")[:2]
    )


def print_notices(state: ResumeState, how_to_repeat: str, console: Console) -> None:
    """Say which records are used although the code changed, and which cells are not repeated."""
    if state.other_code:
        console.print(
            f"{len(state.other_code)} cells were measured with another state of the code and are "
            "used as they are; `sweep.remeasure=true` measures them anew.",
            highlight=False,
        )
    if state.not_measured:
        console.print(
            f"{len(state.not_measured)} cells ended otherwise and are not repeated; "
            f"{how_to_repeat}.",
            highlight=False,
            markup=False,  # rich would read a list in brackets as a style
        )


def _usable(runs: Iterable[RunRecord], plan: SweepPlan, torch_version: str) -> list[RunRecord]:
    entries = plan.entries
    return [
        run
        for run in runs
        if run.cell_id in entries and comparable(run, entries[run.cell_id], torch_version)
    ]


def _measured_blocks(runs: Iterable[RunRecord]) -> MeasuredBlocks:
    found: MeasuredBlocks = {}
    for run in runs:
        if run.status == Status.measured:
            found.setdefault(run.cell_id, {})[run.block] = run.environment.get("nodes_used")
    return found


def _num_missing(
    entry: PlannedCell,
    plan: SweepPlan,
    measured: MeasuredBlocks,
    not_measured: Mapping[str, RunRecord],
) -> int:
    own = measured.get(entry.cell_id, {})
    baseline = plan.entries.get(entry.baseline_id or "")
    if baseline is None or baseline is entry or baseline.cell_id in not_measured:
        return entry.spec.measurement.blocks - len(own)
    beside = measured.get(baseline.cell_id, {})
    pairs = [b for b, nodes in own.items() if b in beside and share_nodes(nodes, beside[b])]
    return entry.spec.measurement.blocks - len(pairs)


def _is_needed_beside_others(entry: PlannedCell, plan: SweepPlan) -> bool:
    return any(e.baseline_id == entry.cell_id and e is not entry for e in plan.runnable)


def _given_up(runs: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Return the cells that this command does not try again, each with its latest run."""
    kills: Counter[str] = Counter()
    found: dict[str, RunRecord] = {}
    for run in runs:
        kills[run.cell_id] = kills[run.cell_id] + 1 if run.status in STOPPED_FROM_OUTSIDE else 0
        is_result = run.status not in (*STOPPED_FROM_OUTSIDE, Status.measured)
        if is_result or kills[run.cell_id] >= KILLS_IN_A_ROW:
            found[run.cell_id] = run
    return found


def _of_other_code(run: RunRecord, code: Mapping[str, Any]) -> bool:
    is_measured = run.status == Status.measured
    return is_measured and run.environment.get("git_commit") != code["git_commit"]
