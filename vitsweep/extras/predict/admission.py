"""What predictions do to the cells of a command: columns of a plan, cells that are left out, minutes of jobs.

A prediction never stops a command and delays no run. Whatever goes wrong leaves the cell without one, with a
message. With `VITSWEEP_PREDICT=never` in the environment none is made.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from math import inf
from typing import Any

from rich.console import Console

from vitsweep.api.plan import PlanOverview
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import periodic_status
from vitsweep.errors import VitsweepError
from vitsweep.extras.predict.prediction import (
    CellPrediction,
    limit_bytes,
    predict_cells,
    process_bytes,
)
from vitsweep.files import write_atomically
from vitsweep.planning.blocks import run_seconds, runs_per_cell
from vitsweep.planning.closed_memory import Sizes, memory
from vitsweep.planning.freeze import planned_store
from vitsweep.planning.pending import CellState, is_pruned, lone_baselines, resume_state
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import utc_now
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import HERE, Machine
from vitsweep.tables.formatting import count, duration, number

# Cells that their predictions leave out: too large, or beyond `sweep.max_gpu_hours`.

Predictions = Mapping[str, CellPrediction]
"""Cell id -> prediction; cells without one stay in a plan."""
SAFETY = 2.0
"""How many times the formula's memory a device must have, for a cell to fit without being traced."""


def without_left_out(
    plan: SweepPlan, settings: SweepSettings, found: Predictions, missing: Mapping[str, int]
) -> SweepPlan:
    """Refuse the cells that `sweep.only` and `sweep.max_gpu_hours` leave out, with the figures.

    Args:
        plan: the cells.
        settings: of the sweep; with `try_anyway` nothing is left out.
        found: predictions.
        missing: cell id -> number of blocks it lacks.
    """
    if settings.try_anyway:
        return plan
    if settings.only == "fits":
        plan = mark_invalid(plan, {key: f.why_not for key, f in found.items() if f.why_not})
    hours = settings.max_gpu_hours
    if hours is not None:
        plan = _within_hours(plan, found, missing, settings.cells_per_block, hours)
    return plan


def mark_invalid(plan: SweepPlan, reasons: Mapping[str, str]) -> SweepPlan:
    """Make cells invalid; those whose baseline is among them have none.

    Args:
        plan: the cells.
        reasons: cell id -> why it is left out.
    """
    entries = dict(plan.entries)
    for cell_id, entry in plan.entries.items():
        if cell_id in reasons:
            reason = reasons[cell_id]
            entries[cell_id] = replace(entry, reasons=(*entry.reasons, reason), baseline_id=None)
        elif entry.baseline_id in reasons:
            entries[cell_id] = replace(entry, baseline_id=None)
    return SweepPlan(entries)


def _within_hours(
    plan: SweepPlan,
    found: Predictions,
    missing: Mapping[str, int],
    cells_per_block: int,
    most: float,
) -> SweepPlan:
    """Refuse what the hours do not cover, in the order of the command.

    A cell costs the runs that it adds: its own, and those of its baseline in blocks that are not counted yet.
    """
    spent, counted, reasons = 0.0, dict[str, int](), dict[str, str]()
    for entry in plan.runnable:
        if entry.is_added_baseline:
            continue
        with_it = counted | {entry.cell_id: missing.get(entry.cell_id, 0)}
        runs = runs_per_cell(plan, with_it, cells_per_block)
        hours = sum(n * _run_hours(found.get(cell_id)) for cell_id, n in runs.items())
        if hours == inf:
            reasons[entry.cell_id] = (
                "no length of a run of it or of its baseline is predicted, so that `sweep.max_gpu_hours="
                f"{most:g}` cannot hold: leave that out, or use `sweep.minutes`."
            )
        elif hours > most:
            reasons[entry.cell_id] = (
                f"needs {hours - spent:.2g} of the {most - spent:.2g} predicted hours of devices that "
                f"`sweep.max_gpu_hours={most:g}` leaves it: raise it, or measure fewer cells."
            )
        else:
            spent, counted = hours, with_it
    kept = mark_invalid(plan, reasons).entries
    wanted = {entry.baseline_id for entry in kept.values()}
    return SweepPlan({c: e for c, e in kept.items() if not e.is_added_baseline or c in wanted})


def _run_hours(prediction: CellPrediction | None) -> float:
    """Return the device-hours of a run: infinite where its step time or its length is unknown."""
    hours = prediction and prediction.run_device_hours
    return hours[0] if hours else inf


SECONDS_BEFORE_A_SUBMISSION = 60.0
"""After which a command begins no trace of cells that may be too large; those without one are submitted."""
SECONDS_OF_A_PLAN = 30.0
"""After which `plan` begins no trace. What was traced is kept, so that the same command goes on."""
STORED = (
    "step_time_ms",
    "step_time_low_ms",
    "step_time_high_ms",
    "images_per_second",
    "peak_gib",
    "parameter_gib",
    "gradient_gib",
    "optimizer_state_gib",
    "parameter_bytes_per_step",
    "gradient_bytes_per_step",
    "optimizer_bytes_per_step",
    "activation_bytes_per_step",
)
"""Columns of a prediction that go into the record."""


def predicts() -> bool:
    """Whether predictions are made along with runs."""
    return os.environ.get("VITSWEEP_PREDICT", "always") != "never"


def keep_predictions(found: Predictions, store: Store) -> None:
    """Keep predictions of cells that have no run.

    Next to what is measured stands only what was predicted before.

    Args:
        found: predictions.
        store: of the sweep.
    """
    for cell_id, prediction in found.items():
        if prediction.trace and not store.has_runs(cell_id):
            with suppress(OSError):  # it stops no command
                _keep(prediction, cell_id, store)


def keep_for_later(found: Predictions, machine: Machine) -> None:
    """Keep predictions for sweeps on this machine, which adopt them; where nothing can be kept, none."""
    with suppress(VitsweepError):
        keep_predictions(found, planned_store(machine.device).create())


def minutes(entries: Sequence[PlannedCell], store: Store, machine: Machine) -> dict[str, float]:
    """Keep predictions, for this machine, of cells that were traced before; trace none.

    Returns:
        Cell id -> minutes of a run at the upper end of its interval of 80 %.
    """
    if not predicts():
        return {}
    specs = {entry.cell_id: entry.spec for entry in entries}
    found = predict_cells(specs, only_cached=True, machine=machine)
    keep_predictions({c: f for c, f in found.items() if not store.is_predicted(c)}, store)
    return {
        cell_id: (run_seconds(each.cell, each.step_time.high_ms) or 0.0) / 60
        for cell_id, each in found.items()
        if each.step_time and not each.cell.task.epochs
    }


def _keep(found: CellPrediction, cell_id: str, store: Store) -> None:
    columns = found.columns()
    kept = {name: columns.get(name) for name in STORED}
    numbers = {f"predicted_{k}": float(v) for k, v in kept.items() if isinstance(v, (int, float))}
    text = json.dumps(numbers | {"made_at": utc_now()}, indent=1)
    write_atomically(store.cell(cell_id) / "prediction.json", text)


def admitted(
    plan: SweepPlan,
    settings: SweepSettings,
    console: Console,
    machine: Machine,
    store: Store,
) -> SweepPlan:
    """Leave out cells that predictions exclude: they become invalid, with the figures.

    `sweep.only` and `sweep.max_gpu_hours` are for any machine (`without_left_out`). Before jobs are
    submitted, cells that are too large for the cluster's GPUs, or for their own budget of memory, are
    left out in any case, save by `sweep.try_anyway`.

    Args:
        plan: the cells.
        settings: of the sweep.
        console: for what the user should know while cells are traced.
        machine: on which the cells will run.
        store: of the sweep; its records say which runs are missing.
    """
    if settings.try_anyway:
        return plan
    if settings.only is None and settings.max_gpu_hours is None:
        submitted = machine.described_by != HERE
        if submitted and predicts():
            return _without_too_large(plan, console, machine)
        return plan

    here = machine.described_by == HERE
    with tracing(console) as progress:
        found = predict_cells(
            {entry.cell_id: entry.spec for entry in plan.runnable},
            progress=progress,
            machine=machine,
        )
    if here and predicts():
        keep_for_later(found, machine)
    for rates in dict.fromkeys(f.step_time.rates for f in found.values() if f.step_time):
        console.print(f"Step times are predicted for {rates}.")
    runs = list(store.runs()) if store.cells.is_dir() else []
    missing = resume_state(plan, runs, settings, version("torch")).missing_blocks
    return without_left_out(plan, settings, found, missing)


@contextmanager
def tracing(console: Console, way_out: str = "") -> Iterator[Callable[[int, int], None]]:
    """Say how many steps are traced, while it lasts and whenever there are more; and how to do without."""
    traced, said = [0, 0], [""]

    def progress(done: int, of: int) -> None:
        traced[:] = [done, of]

    def line() -> str:
        text = "Predictions: steps are traced without running them"
        if traced[1]:
            text = f"Predictions: {traced[0]} of {traced[1]} steps traced"
        news, said[0] = text != said[0], text
        return f"{text}{way_out}" if news else ""

    with periodic_status(console.print, line):
        yield progress


def _without_too_large(plan: SweepPlan, console: Console, machine: Machine) -> SweepPlan:
    """Refuse what will not fit; traced are only cells of which a formula does not show that they fit."""

    doubtful = {}
    for entry in plan.runnable:
        resources = entry.spec.resources
        if resources.device == "cpu" and resources.memory_gib_per_rank is None:
            continue  # what a node of the cluster has is not known here
        limit = limit_bytes(entry.spec, gib_per_device=machine.gib_per_device)
        if limit and not _surely_fits(entry.spec, limit - process_bytes(entry.spec)):
            doubtful[entry.cell_id] = entry.spec
    if not doubtful:
        return plan
    with tracing(console) as progress:
        found = predict_cells(
            doubtful,
            progress=progress,
            seconds=SECONDS_BEFORE_A_SUBMISSION,
            times_operators=False,
            machine=machine,
        )
    return mark_invalid(plan, {key: f.why_not for key, f in found.items() if f.is_too_large})


def _surely_fits(cell: CellSpec, limit_bytes: float) -> bool:
    """Whether a formula says that a rank needs much less than `limit_bytes`; False where it cannot tell."""
    if not cell.model.has_memory_formula:
        return False
    # Kernels that write scores to memory say that they do not compute them again.
    sizes = replace(Sizes.of(cell), fused_attention=cell.attention.recomputes_scores)
    return SAFETY * memory(sizes).peak < limit_bytes


# Predictions next to the cells of a plan, and their sums.

WILL_NOT_FIT = "will not fit"
OVER_BUDGET = "over budget"


def predicted(
    found: PlanOverview,
    settings: SweepSettings,
    hardware: str | None,
    machine: Machine,
    console: Console,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows with predictions, without what the settings leave out because of them, and their sums."""
    needs_all = settings.only or settings.max_gpu_hours
    if not (predicts() or hardware or needs_all):
        return found.rows, []
    plan, missing = found.plan, found.state.missing_blocks
    here = machine.described_by == HERE and not hardware
    specs = {entry.cell_id: entry.spec for entry in plan.runnable}
    with tracing(console, "; `plan --no-predict` leaves them out") as progress:
        predictions = predict_cells(
            specs,
            hardware,
            progress,
            seconds=None if needs_all else SECONDS_OF_A_PLAN,
            machine=machine,
        )
    if here:
        keep_for_later(predictions, machine)
    kept = without_left_out(plan, settings, predictions, missing)
    runs = found.screenings + runs_per_cell(kept, missing, settings.cells_per_block)
    rows = with_predictions(found.rows, plan, kept, predictions, runs)
    screened = screened_by_predictions(rows, replace(found, plan=kept), settings)
    return rows, sums(rows, machine, screened)


def screened_by_predictions(
    rows: Sequence[Mapping[str, Any]], found: PlanOverview, settings: SweepSettings
) -> dict[str, bool]:
    """Return cell id -> whether it is a lone baseline, of what ends after its screening run as predicted."""
    plan, speeds = found.plan, {r["cell_id"]: r.get("images_per_second") or 0.0 for r in rows}
    slowdowns = {
        cell_id: speeds.get(plan.entries[cell_id].baseline_id or "", 0.0) / own
        for cell_id, own in speeds.items()
        if own and found.screenings[cell_id]
    }
    pruned = {c for c, s in slowdowns.items() if is_pruned(plan.entries[c], s, settings)}
    return dict.fromkeys(lone_baselines(plan, pruned), True) | dict.fromkeys(pruned, False)


_NOT_TRACED = f"not traced within {SECONDS_OF_A_PLAN:.0f} s: the same command goes on"


def with_predictions(
    rows: Sequence[Mapping[str, Any]],
    plan: SweepPlan,
    kept: SweepPlan,
    found: Mapping[str, CellPrediction],
    runs: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Add the columns of the predictions to the rows of a plan; invalid cells have none.

    A runnable cell that needs more memory than there is becomes `will not fit`, and one that
    `sweep.max_gpu_hours` does not cover `over budget`, with the reason. Baselines that no cell needs any more
    have no row.

    Args:
        rows: of all cells.
        plan: all cells.
        kept: without those that the settings of the sweep leave out, see `without_left_out`.
        found: cell id -> prediction.
        runs: cell id -> runs that it lacks in `kept`.
    """
    added = []
    for row in rows:
        key = row["cell_id"]
        if key not in kept.entries:
            continue
        row = {**row, "runs": runs.get(key, 0)}
        if prediction := found.get(key):
            row |= prediction.columns(row["runs"])
        elif not kept.entries[key].reasons:
            row["why_not_predicted"] = _NOT_TRACED
        refused = kept.entries[key].reasons[len(plan.entries[key].reasons) :]
        too_large = prediction.why_not if prediction else ""
        if row["state"] == CellState.runnable and too_large:
            row |= {"state": WILL_NOT_FIT, "reasons": [too_large]}
        elif row["state"] == CellState.runnable and refused:
            row |= {"state": OVER_BUDGET, "reasons": list(refused)}
        added.append(row)
    return added


def fastest_predicted(intervals: Sequence[tuple[str, float, float]], among: str = "") -> str:
    """Say which cell is predicted to be fastest, if its interval overlaps no other.

    Args:
        intervals: name and 80 % interval of the throughput, the highest prediction first.
        among: which cells these are, where they are not all; begins with a space.
    """
    (name, low, _), *others = intervals
    beside = [other for other, _, high in others if high >= low]
    if not beside:
        return f"Predicted to be fastest{among}: {name}."
    more = f"{name}, {beside[0]} and {count(len(beside) - 1, 'other')}"
    named = more if len(beside) > 1 else f"{name} and {beside[0]}"
    return f"Which is fastest{among} is not predicted: the 80 % intervals of {named} overlap. Measure them."


def sums(
    rows: Sequence[Mapping[str, Any]], machine: Machine, screened: Mapping[str, bool] = {}
) -> list[str]:
    """Say what the runs that are missing take, and what could not be predicted.

    Args:
        rows: with predictions.
        machine: the node that they run on.
        screened: see `screened_by_predictions`.
    """
    lacking = [row for row in rows if row["runs"] and row["state"] == CellState.runnable]
    counted = [row for row in lacking if row.get("device_hours")]
    lines = []
    if counted:
        hours = [sum(row[f"device_hours{end}"] for row in counted) for end in ("", "_low", "_high")]
        total, low, high = (number(each, 2) for each in hours)
        part = f" of {len(counted)} of {len(lacking)} cells" * (len(counted) < len(lacking))
        line = f"Predicted for the missing runs{part}: "
        if machine.devices_per_node > 1:
            line += f"{number(hours[0] / machine.devices_per_node, 2)} node-hours = "
        unit = "GPU-hours" if machine.device == "cuda" else "rank-hours"
        line += f"{total} {unit} of {machine.described_by} ({low} to {high})"
        line += f", {duration(3600 * sum(row['hours'] for row in counted))} one run after the other"
        lines.append(line + ".")
        if slow := len(screened) - sum(screened.values()):
            left = sum(
                row["device_hours"] / (row["runs"] if row["cell_id"] in screened else 1)
                for row in counted
            )
            lines.append(
                f"{count(slow, 'cell')} of them would get a screening run alone, as `sweep.prune_slowdown` "
                f"says of such slow ones: {number(left, 2)} {unit} without their blocks."
            )
    endless = [row["cell"] for row in rows if row["runs"] and row.get("device_hours", 0) is None]
    if endless:
        lines.append(
            f"Trainings of unknown length are not counted: {', '.join(endless)}: their `data` does not say "
            "how many images it has."
        )
    for reason in dict.fromkeys(
        row["why_not_predicted"] for row in rows if "why_not_predicted" in row
    ):
        cells = [row["cell"] for row in rows if row.get("why_not_predicted") == reason]
        lines.append(f"Not predicted: {', '.join(cells)}: {reason}.")
    rates = dict.fromkeys(row["rates"] for row in rows if row.get("rates"))
    lines += [f"Step times are predicted for {each}; brackets: 80 % interval." for each in rates]
    notes = [note for row in rows for note in (row.get("notes") or "").splitlines()]
    return [*lines, *_fastest(rows), *dict.fromkeys(notes)]


def _fastest(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which cell is predicted to be fastest, of those with equal numbers of ranks each."""
    runnable = [row for row in rows if not row["reasons"]]
    known = [row for row in runnable if row.get("images_per_second")]
    known.sort(key=lambda row: -row["images_per_second"])
    sizes = sorted({row["ranks"] for row in known})
    for ranks in sizes:
        some = [row for row in known if row["ranks"] == ranks]
        predicted = " predicted" * (len(known) < len(runnable))
        among = f" of the {len(some)}{predicted} cells" + f" on {count(ranks, 'rank')}" * (
            len(sizes) > 1
        )
        is_all = len(some) == len(runnable)
        if len(some) > 1:
            intervals = [(row["cell"], *_throughputs(row)) for row in some]
            yield fastest_predicted(intervals, "" if is_all else among)


def _throughputs(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the ends of the interval of the images per second that follow from those of the step time."""
    images = row["images_per_second"] * row["step_time_ms"]
    return images / row["step_time_high_ms"], images / row["step_time_low_ms"]
