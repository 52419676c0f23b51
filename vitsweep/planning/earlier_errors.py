"""What the records of earlier sweeps say about predicted step times on a device."""

from collections.abc import Iterator

from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.predict.residuals import ResidualModel, fit_residuals
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import choices_before
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.tables.load import load

MOST_SWEEPS = 30
"""The latest sweeps beside the planned one whose records count."""
PREDICTED = "predicted_uncorrected_step_time_ms"
BEFORE = choices_before()
"""Groups that tables of earlier versions lack, and what their cells did."""


def earlier_errors(store: Store, device: str | None) -> ResidualModel:
    """Fit corrections to the records of the sweeps beside `store`, itself included.

    Args:
        store: of the sweep that is planned; it need not exist.
        device: name as in the `device` column of records; None where it is unknown.

    Returns:
        No correction where there are too few records with a prediction on that device.
    """
    settings: list[dict[str, str]] = []
    measured: list[float] = []
    predicted: list[float] = []
    for cells in _tables(store) if device else ():
        if not {PREDICTED, "step_time_ms", "device", *TECHNIQUE_GROUPS} - set(BEFORE) <= set(cells):
            continue
        rows = cells[(cells["device"] == device) & (cells["status"] == "measured")]
        for row in rows.dropna(subset=[PREDICTED, "step_time_ms"]).to_dict("records"):
            chosen = {group: str(row.get(group, BEFORE.get(group))) for group in TECHNIQUE_GROUPS}
            settings.append(
                {"model": str(row["model"]), "ranks": str(int(row["world_size"])), **chosen}
            )
            measured.append(float(row["step_time_ms"]))
            predicted.append(float(row[PREDICTED]))
    return fit_residuals(settings, measured, predicted)


def _tables(store: Store) -> Iterator[DataFrame]:
    paths = store.root.parent.glob("*/cells.parquet")
    latest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in latest[:MOST_SWEEPS]:
        try:
            yield load(path)
        except (VitsweepError, OSError, ValueError):  # damaged, or of another version
            continue
