"""`vitsweep plan`: what a sweep would run, without training anything."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import open_console
from vitsweep.planning.freeze import plan_of, store_of
from vitsweep.planning.pending import ResumeState, known
from vitsweep.planning.provenance import code_state
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, cell_labels
from vitsweep.results.store import Store
from vitsweep.spec.machine import Machine

RUNNABLE, INVALID, MEASURED, ENDED = "runnable", "invalid", "measured", "ended"


def plan(
    cells: Sequence[ComposedCell], settings: SweepSettings, composer: Composer, machine: Machine
) -> list[dict[str, Any]]:
    """Print every cell with its state and return one row per cell."""
    sweep_plan = plan_of(cells, machine, composer)
    store = store_of(settings)
    runs = store.runs() if store.cells.is_dir() else ()
    rows = plan_rows(sweep_plan, known(sweep_plan, runs, settings, code_state()))
    _show(rows, store, open_console())
    return rows


def plan_rows(plan: SweepPlan, known: ResumeState) -> list[dict[str, Any]]:
    """Return one row per cell: id, label, state, runs it lacks, reasons."""
    named = cell_labels(plan)
    return [
        {
            "cell_id": entry.cell_id,
            "cell": named[entry.cell_id],
            "state": _state(entry, known),
            "runs": known.missing.get(entry.cell_id, 0),
            "is_baseline": entry.is_added_baseline,
            "reasons": list(entry.reasons) or _ended_reason(entry, known),
        }
        for entry in plan.entries.values()
    ]


def _state(entry: PlannedCell, known: ResumeState) -> str:
    if entry.reasons:
        return INVALID
    if entry.cell_id in known.ended:
        return ENDED
    return RUNNABLE if known.missing.get(entry.cell_id) or entry.is_added_baseline else MEASURED


def _ended_reason(entry: PlannedCell, known: ResumeState) -> list[str]:
    run = known.ended.get(entry.cell_id)
    return [f"{run.status}: {run.reason}"] if run else []


def _show(rows: list[dict[str, Any]], store: Store, console: Console) -> None:
    table = Table(title=f"Plan of sweep {store.name}", title_justify="left")
    for column in ("cell", "state", "runs", "reasons"):
        table.add_column(column, overflow="fold")
    for row in rows:
        name = row["cell"] + (" (baseline)" if row["is_baseline"] else "")
        table.add_row(name, row["state"], str(row["runs"] or ""), "\n".join(row["reasons"]))
    console.print(table)
    counts = Counter(row["state"] for row in rows)
    console.print(
        " · ".join(f"{state} {count}" for state, count in counts.items()), highlight=False
    )
