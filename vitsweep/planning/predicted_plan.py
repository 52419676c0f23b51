"""Predictions beside the cells of a plan, and their sums."""

from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame

from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.predict.cell_prediction import CellPrediction
from vitsweep.predict.hardware import hardware_named
from vitsweep.spec.machine import Machine
from vitsweep.tables.formatting import number

WILL_NOT_FIT = "will not fit"
RUNNABLE = "runnable"
OVER_BUDGET = "over budget"
CORES_PER_GPU = 12
"""Of a node that is not here."""


def machine_with(hardware: str) -> Machine:
    """Return a node of the named devices, with as many as its profile says.

    Raises:
        BadValueError: the hardware is unknown.
    """
    profile = hardware_named(hardware)
    devices = int(profile["devices_per_node"])
    return Machine(
        device="cuda",
        cores_per_node=CORES_PER_GPU * devices,
        devices_per_node=devices,
        described_by=profile.title,
    )


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


def as_columns(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return rows as columns of numbers and text, one column for each setting that varies."""
    return DataFrame(
        [
            {k: v for k, v in row.items() if k not in ("settings", "reasons")}
            | row["settings"]
            | {"reasons": " ".join(row["reasons"])}
            for row in rows
        ]
    )


def sums(rows: Sequence[Mapping[str, Any]], device: str) -> list[str]:
    """Say what the runs that are missing take, and what could not be predicted.

    Args:
        rows: with predictions.
        device: name of what they run on.
    """
    counted = [row for row in rows if row.get("device_hours") and row["state"] == RUNNABLE]
    lines = []
    if counted:
        total, low, high = (
            number(sum(row[f"device_hours{end}"] for row in counted), 2)
            for end in ("", "_low", "_high")
        )
        line = f"Predicted for the missing runs: {total} hours of {device} ({low} to {high})"
        if all(row["cost_low_usd"] is not None for row in counted):
            cost = [
                number(sum(row[f"cost_{end}_usd"] for row in counted), 2) for end in ("low", "high")
            ]
            line += f", {cost[0]} to {cost[1]} USD at published prices"
        lines.append(line + ".")
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
    return lines + list(dict.fromkeys(row["notes"] for row in rows if row.get("notes")))
