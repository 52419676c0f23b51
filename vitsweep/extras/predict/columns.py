"""Predictions beside the cells of a plan, and their sums."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from vitsweep.api.plan import RUNNABLE, PlanOverview
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.extras.predict.admission import (
    keep_for_later,
    predicts,
    tracing,
    without_left_out,
)
from vitsweep.extras.predict.prediction import CellPrediction, predict_cells
from vitsweep.planning.blocks import runs_per_cell
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.spec.resources import HERE, Machine
from vitsweep.tables.formatting import count, duration, number

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
    if not (predicts() or hardware):
        return found.rows, []
    plan, missing = found.plan, found.state.missing_blocks
    here = machine.described_by == HERE and not hardware
    specs = {entry.cell_id: entry.spec for entry in plan.runnable}
    with tracing(console) as progress:
        predictions = predict_cells(
            specs, hardware, progress, gib_per_device=machine.gib_per_device
        )
    if here:
        keep_for_later(predictions, machine)
    kept = without_left_out(plan, settings, predictions, missing)
    runs = found.looks + runs_per_cell(kept, missing, settings.cells_per_block)
    rows = with_predictions(found.rows, plan, kept, predictions, runs)
    return rows, sums(rows, machine)


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
        kept: without those that the settings of the sweep leave out, see `left_out`.
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
        refused = kept.entries[key].reasons[len(plan.entries[key].reasons) :]
        too_large = prediction.why_not if prediction else ""
        if row["state"] == RUNNABLE and too_large:
            row |= {"state": WILL_NOT_FIT, "reasons": [too_large]}
        elif row["state"] == RUNNABLE and refused:
            row |= {"state": OVER_BUDGET, "reasons": list(refused)}
        added.append(row)
    return added


def fastest_predicted(intervals: Sequence[tuple[str, float, float]]) -> str:
    """Say which cell is predicted to be fastest, if its interval overlaps no other.

    Args:
        intervals: name and 80 % interval of the throughput, the highest prediction first.
    """
    (name, low, _), *others = intervals
    beside = [other for other, _, high in others if high >= low]
    if not beside:
        return f"Predicted to be fastest: {name}."
    more = f"{name}, {beside[0]} and {count(len(beside) - 1, 'other')}"
    named = more if len(beside) > 1 else f"{name} and {beside[0]}"
    return (
        f"Which is fastest is not predicted: the 80 % intervals of {named} overlap. Measure them."
    )


def sums(rows: Sequence[Mapping[str, Any]], machine: Machine) -> list[str]:
    """Say what the runs that are missing take, and what could not be predicted.

    Args:
        rows: with predictions.
        machine: the node that they run on.
    """
    counted = [row for row in rows if row.get("device_hours") and row["state"] == RUNNABLE]
    lines = []
    if counted:
        hours = [sum(row[f"device_hours{end}"] for row in counted) for end in ("", "_low", "_high")]
        total, low, high = (number(each, 2) for each in hours)
        line = "Predicted for the missing runs: "
        if machine.devices_per_node > 1:
            line += f"{number(hours[0] / machine.devices_per_node, 2)} node-hours = "
        unit = "GPU-hours" if machine.device == "cuda" else "rank-hours"
        line += f"{total} {unit} of {machine.described_by} ({low} to {high})"
        line += f", {duration(3600 * sum(row['hours'] for row in counted))} one run after the other"
        if all(row["cost_low_usd"] is not None for row in counted):
            cost = [
                number(sum(row[f"cost_{end}_usd"] for row in counted), 2) for end in ("low", "high")
            ]
            line += f", {cost[0]} to {cost[1]} USD at published prices"
        lines.append(line + ".")
    if kept := sum(row.get("kept_weights_gib") or 0.0 for row in counted):
        lines.append(
            f"Their trained weights take {number(kept, 2)} GiB on disk (`task.keep=none` keeps none)."
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
    lines += [f"Step times by {each}, in brackets the interval of 80 %." for each in rates]
    known = [row for row in rows if row.get("images_per_second") and not row["reasons"]]
    if len(known) > 1:
        known.sort(key=lambda row: -row["images_per_second"])
        lines.append(fastest_predicted([(row["cell"], *_throughputs(row)) for row in known]))
    return lines + list(dict.fromkeys(row["notes"] for row in rows if row.get("notes")))


def _throughputs(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the ends of the interval of the images per second that follow from those of the step time."""
    images = row["images_per_second"] * row["step_time_ms"]
    return images / row["step_time_high_ms"], images / row["step_time_low_ms"]
