"""`vitsweep plan`: what a sweep would run and could show, without training anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from vitsweep.planning.earlier_errors import earlier_errors
from vitsweep.planning.freeze import plan_of, store_of
from vitsweep.planning.left_out import without_left_out
from vitsweep.planning.notices import print_notices
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.plan_request import PlanRequest
from vitsweep.planning.plan_view import show_plan
from vitsweep.planning.predicted_plan import as_columns, machine_with, sums, with_predictions
from vitsweep.planning.prediction_before_run import tracing
from vitsweep.planning.provenance import code_state
from vitsweep.planning.race_plan import describe_race
from vitsweep.planning.race_rounds import RaceRounds
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels, cell_settings
from vitsweep.predict.cell_prediction import predict_cells
from vitsweep.predict.hardware import hardware_named
from vitsweep.report.plan_page import plan_page
from vitsweep.results.store import Store
from vitsweep.spec.machine import HERE, Machine


def plan(
    cells: Sequence[ComposedCell],
    settings: SweepSettings,
    composer: Composer,
    machine: Machine,
    with_paired_baselines: Callable[[SweepPlan], SweepPlan] = lambda plan: plan,
    request: PlanRequest | None = None,
) -> list[dict[str, Any]]:
    """Print every cell with its state and prediction, and return one row per cell (see `overview`).

    Args:
        cells: see `overview`.
        settings: see `overview`.
        composer: see `overview`.
        machine: see `overview`; not used where `request` names hardware.
        with_paired_baselines: see `overview`.
        request: what to predict and to write.

    Raises:
        BadValueError: a device or a column is unknown.
    """
    request = request or PlanRequest(predict=False)
    for name in request.hardware:
        hardware_named(name)  # refused before anything is traced
    console = open_console()
    rows = []
    for hardware in request.hardware or (None,):
        node = machine_with(hardware) if hardware else machine
        found = overview(cells, settings, composer, node, with_paired_baselines)
        title = f"Plan of sweep {found.store.name}"
        if hardware:
            found = replace(found, rows=[row | {"hardware": hardware} for row in found.rows])
            title += f" on {node.described_by}"
        if request.predict:
            found = replace(found, rows=_predicted(found, settings, hardware, machine, console))
        show_plan(found.rows, title, request.columns, console)
        if request.predict:
            _show_sums(found.rows, node, console)
        if not hardware:
            again = f"`vitsweep retry {found.store.name}` runs them again"
            print_notices(found.state, found.plan, found.store, again, console)
        if found.detectable_effect:
            console.print(found.detectable_effect, highlight=False)
        rows += found.rows
    _write(rows, request, settings.name, console)
    return rows


def _predicted(
    found: "PlanOverview",
    settings: SweepSettings,
    hardware: str | None,
    machine: Machine,
    console: Console,
) -> list[dict[str, Any]]:
    """Return the rows with their predictions, and without what the settings leave out because of them."""
    plan, missing = found.plan, found.state.missing_blocks
    here = machine.described_by == HERE and not hardware
    residuals = earlier_errors(found.store, device_name(machine.device) if here else None)
    specs = {entry.cell_id: entry.spec for entry in plan.runnable}
    with tracing(console) as progress:
        predictions = predict_cells(
            specs, hardware, residuals, progress, gib_per_device=machine.gib_per_device
        )
    kept = without_left_out(plan, settings, predictions, missing)
    runs = runs_per_cell(kept, missing, settings.cells_per_block)
    return with_predictions(found.rows, plan, kept, predictions, runs)


def _show_sums(rows: list[dict[str, Any]], node: Machine, console: Console) -> None:
    device = "one rank" if node.described_by == HERE else node.described_by
    for line in sums(rows, device):
        console.print(line, highlight=False, markup=False)


def _write(rows: list[dict[str, Any]], request: PlanRequest, name: str, console: Console) -> None:
    table = as_columns(rows)
    if request.parquet:
        table.to_parquet(request.parquet, index=False)
        console.print(f"All columns: {request.parquet}", highlight=False)
    if request.html:
        request.html.write_text(plan_page(name, table), encoding="utf-8")
        console.print(f"Page: {request.html}", highlight=False)


@dataclass(frozen=True, kw_only=True)
class PlanOverview:
    """What a sweep would run and could show.

    Attributes:
        rows: one per cell, see `plan_rows`.
        plan: the cells with their baselines.
        state: what is measured already.
        store: of the sweep; its folder need not exist.
        detectable_effect: a sentence on how small a difference the sweep could show, or ""; of a race,
            how it would proceed.
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
    if settings.search == "race":
        outlook = describe_race(RaceRounds(sweep_plan, settings, store, code_state(), runs))
    else:
        outlook = describe_detectable_effect(sweep_plan, noise) or ""
    return PlanOverview(
        rows=rows, plan=sweep_plan, state=state, store=store, detectable_effect=outlook
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
