"""Predictions beside the cells of a plan, and their sums."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pandas import DataFrame

from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.predict.cell_prediction import CellPrediction, predict_cells
from vitsweep.predict.hardware import hardware_named
from vitsweep.predict.residuals import NO_RESIDUALS, ResidualModel
from vitsweep.spec.machine import Machine
from vitsweep.tables.formatting import number

WILL_NOT_FIT = "will not fit"
RUNNABLE = "runnable"
GPUS_PER_NODE = 8
"""Of a machine that is not here: a usual node, unless `resources.ranks_per_node` says otherwise."""
CORES_PER_NODE = 96


def machine_with(hardware: str) -> Machine:
    """Return a node of eight of the named devices.

    Raises:
        BadValueError: the hardware is unknown.
    """
    profile = hardware_named(hardware)
    return Machine(
        device="cuda",
        cores_per_node=CORES_PER_NODE,
        devices_per_node=GPUS_PER_NODE,
        described_by=profile.title,
    )


def with_predictions(
    rows: Sequence[Mapping[str, Any]],
    plan: SweepPlan,
    hardware: str | None = None,
    residuals: ResidualModel = NO_RESIDUALS,
    progress: Callable[[int, int], None] = lambda done, of: None,
    gib_per_device: float | None = None,
) -> list[dict[str, Any]]:
    """Add the columns of the predictions to the rows of a plan; invalid cells have none.

    A runnable cell that needs more memory than there is becomes `will not fit`, with the reason.
    For the arguments see `predict.cell_prediction.predict_cells`.
    """
    specs = {key: entry.spec for key, entry in plan.entries.items() if not entry.reasons}
    predictions = predict_cells(specs, hardware, residuals, progress, gib_per_device=gib_per_device)
    return [_with_prediction(dict(row), predictions.get(row["cell_id"])) for row in rows]


def _with_prediction(row: dict[str, Any], prediction: CellPrediction | None) -> dict[str, Any]:
    if prediction is None:
        return row
    row |= prediction.columns(int(row["runs"] or 0))
    if row["state"] == RUNNABLE and prediction.why_not:
        row |= {"state": WILL_NOT_FIT, "reasons": [prediction.why_not]}
    return row


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
    for reason in dict.fromkeys(
        row["why_not_predicted"] for row in rows if "why_not_predicted" in row
    ):
        cells = [row["cell"] for row in rows if row.get("why_not_predicted") == reason]
        lines.append(f"Not predicted: {', '.join(cells)}: {reason}.")
    rates = dict.fromkeys(row["rates"] for row in rows if row.get("rates"))
    lines += [f"Step times by {each}, in brackets the interval of 80 %." for each in rates]
    return lines + list(dict.fromkeys(row["notes"] for row in rows if row.get("notes")))
