"""`vitsweep plan`: what a sweep would run and could show, without training anything."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import open_console
from vitsweep.measure.device_name import device_name
from vitsweep.planning.blocks import runs_per_cell
from vitsweep.planning.detectable_effect import (
    describe_detectable_effect,
    noise_of,
    noise_of_other_sweep,
)
from vitsweep.planning.freeze import plan_of, store_of
from vitsweep.planning.notices import print_notices
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.provenance import code_state
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels, cell_settings
from vitsweep.results.store import Store
from vitsweep.spec.machine import HERE, Machine
from vitsweep.tables.reasons import reason_lines
from vitsweep.tables.terminal import as_table


def plan(
    cells: Sequence[ComposedCell],
    settings: SweepSettings,
    composer: Composer,
    machine: Machine,
    with_paired_baselines: Callable[[SweepPlan], SweepPlan] = lambda plan: plan,
) -> list[dict[str, Any]]:
    """Print every cell with its state and return one row per cell (see `overview`)."""
    found = overview(cells, settings, composer, machine, with_paired_baselines)
    console = open_console()
    _show(found.rows, found.store, console)
    again = f"`vitsweep retry {found.store.name}` runs them again"
    print_notices(found.state, found.plan, found.store, again, console)
    if found.detectable_effect:
        console.print(found.detectable_effect, highlight=False)
    return found.rows


@dataclass(frozen=True, kw_only=True)
class PlanOverview:
    """What a sweep would run and could show.

    Attributes:
        rows: one per cell, see `plan_rows`.
        plan: the cells with their baselines.
        state: what is measured already.
        store: of the sweep; its folder need not exist.
        detectable_effect: a sentence on how small a difference the sweep could show, or "".
    """

    rows: list[dict[str, Any]]
    plan: SweepPlan
    state: ResumeState
    store: Store
    detectable_effect: str


def overview(
    cells: Sequence[ComposedCell],
    settings: SweepSettings,
    composer: Composer,
    machine: Machine,
    with_paired_baselines: Callable[[SweepPlan], SweepPlan] = lambda plan: plan,
) -> PlanOverview:
    """Check all cells and look up what is measured; nothing is written or trained.

    Args:
        cells: of the command.
        settings: of the sweep.
        composer: composes the baselines.
        machine: node for which every `auto` is resolved.
        with_paired_baselines: leaves out the baselines that the launcher cannot run in the blocks of
            their cells.
    """
    sweep_plan = with_paired_baselines(plan_of(cells, machine, composer))
    store = store_of(settings)
    runs = list(store.runs()) if store.cells.is_dir() else []
    state = resume_state(sweep_plan, runs, settings, code_state())
    rows = plan_rows(sweep_plan, state, settings.cells_per_block)
    baselines = (store.baselines() if runs else {}) | sweep_plan.baselines
    noise = noise_of(runs, baselines)
    if not noise.num_ratios and sweep_plan.runnable and machine.described_by == HERE:
        noise = noise_of_other_sweep(store, device_name(machine.device))
    return PlanOverview(
        rows=rows,
        plan=sweep_plan,
        state=state,
        store=store,
        detectable_effect=describe_detectable_effect(sweep_plan, noise) or "",
    )


def plan_rows(plan: SweepPlan, state: ResumeState, cells_per_block: int) -> list[dict[str, Any]]:
    """Return one row per cell: id, label, settings, state, runs it lacks, reasons why it is not run."""
    settings, labels = cell_settings(plan), cell_labels(plan)
    runs = runs_per_cell(plan, state.missing_blocks, cells_per_block)
    return [
        {
            "cell_id": entry.cell_id,
            "cell": labels[entry.cell_id],
            "settings": settings[entry.cell_id],
            "state": str(state.cell_state(entry)),
            "runs": runs[entry.cell_id],
            "is_baseline": entry.is_added_baseline,
            "reasons": state.reasons(entry),
        }
        for entry in plan.entries.values()
    ]


def _show(rows: list[dict[str, Any]], store: Store, console: Console) -> None:
    text = DataFrame(
        [
            {
                "cell": row["cell"] + (" (baseline)" if row["is_baseline"] else ""),
                "state": row["state"],
                "runs": str(row["runs"] or ""),
            }
            for row in rows
            if not row["reasons"]
        ]
    )
    if len(text):
        console.print(as_table(text, f"Plan of sweep {store.name}"))
    reasons = [f"{row['state']}: {' '.join(row['reasons'])}" * bool(row["reasons"]) for row in rows]
    for line in reason_lines([row["settings"] for row in rows], reasons):
        console.print(line, highlight=False, markup=False)
    counts = Counter(row["state"] for row in rows)
    console.print(
        " · ".join(f"{state} {count}" for state, count in counts.items()), highlight=False
    )
