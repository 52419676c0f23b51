"""What is measured already, and so need not run again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import SCHEMA_VERSION, RunRecord, Status

ENDED_FROM_OUTSIDE = (Status.killed, Status.preempted)
"""These say nothing about the cell: the same command runs it again. Other ends are results."""


@dataclass(frozen=True)
class ResumeState:
    """What a store says about the cells of a command.

    Attributes:
        missing: cell -> runs that it lacks.
        ended: cells whose latest run ended otherwise and is not repeated.
        other_code: cells that were measured with another state of the code.
    """

    missing: dict[str, int]
    ended: dict[str, RunRecord]
    other_code: tuple[str, ...]


def known(
    plan: SweepPlan,
    runs: Iterable[RunRecord],
    settings: SweepSettings,
    code: Mapping[str, Any],
) -> ResumeState:
    """Compare a command with what is in the store.

    A run counts if cell, device type, torch's minor version and schema are the same.

    Args:
        plan: the cells of the command.
        runs: records of the store, oldest first for each cell.
        settings: of the sweep; with `remeasure` nothing counts, and cells that ended
            with a status in `retry` run again.
        code: state of the code that would measure now.
    """
    torch_version = code["packages"]["torch"]
    counts: Counter[str] = Counter()
    latest: dict[str, RunRecord] = {}
    other: dict[str, None] = {}
    for run in runs if not settings.remeasure else ():
        entry = plan.entries.get(run.cell_id)
        if entry is None or not comparable(run, entry, torch_version):
            continue
        latest[run.cell_id] = run
        if run.status == Status.measured:
            counts[run.cell_id] += 1
            if run.environment.get("git_commit") != code["git_commit"]:
                other[run.cell_id] = None
    again = (*ENDED_FROM_OUTSIDE, Status.measured, *settings.retry)
    ended = {c: r for c, r in latest.items() if r.status not in again and not counts[c]}
    missing = {
        e.cell_id: e.spec.measurement.blocks - counts[e.cell_id]
        for e in plan.runnable
        if e.cell_id not in ended
        and not (e.is_added_baseline and _all_done(e, plan, counts, ended))
    }
    return ResumeState({c: n for c, n in missing.items() if n > 0}, ended, tuple(other))


def _all_done(
    entry: PlannedCell, plan: SweepPlan, counts: Counter[str], ended: dict[str, RunRecord]
) -> bool:
    """An added baseline runs only in the blocks of cells that need it."""
    return counts[entry.cell_id] > 0 or all(
        e.cell_id in ended for e in plan.runnable if e.baseline_id == entry.cell_id and e != entry
    )


def comparable(run: RunRecord, entry: PlannedCell, torch_version: str) -> bool:
    """Tell whether a run may stand for the cell of a command."""
    of_run = str(run.environment.get("torch") or torch_version)
    return (
        run.schema_version == SCHEMA_VERSION
        and run.environment.get("device_type", entry.spec.resources.device)
        == entry.spec.resources.device
        and of_run.split(".")[:2] == torch_version.split(".")[:2]
    )


def announce(todo: ResumeState, again: str, console: Console) -> None:
    """Say which of the records in the store are used although something speaks against it."""
    if todo.other_code:
        console.print(
            f"{len(todo.other_code)} cells were measured with another state of the code and are "
            "used as they are; `sweep.remeasure=true` measures them anew.",
            highlight=False,
        )
    if todo.ended:
        console.print(
            f"{len(todo.ended)} cells ended otherwise and are not repeated; {again}.",
            highlight=False,
            markup=False,  # a list in brackets is no colour
        )
