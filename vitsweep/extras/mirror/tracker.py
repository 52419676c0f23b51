"""What mirrors the cells of a sweep, as the node `tracker` of its configuration says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pandas import DataFrame

from vitsweep.extras.mirror.wandb_runs import check_tracker, mirror
from vitsweep.results.store import Store
from vitsweep.tables.formatting import plain
from vitsweep.tables.names import CHOICES, names_by_id, varying_columns


def tracker(settings: Mapping[str, Any]) -> Callable[[Store, DataFrame, Sequence[str]], str]:
    """Return what copies cells of a store, with the answers of the sweep, and says so in a sentence.

    Raises:
        VitsweepError: the settings cannot work here.
    """
    check_tracker(settings)

    def mirrored(store: Store, cells: DataFrame, answers: Sequence[str]) -> str:
        return mirror(store, named_rows(cells), settings, answers)

    return mirrored


def named_rows(cells: DataFrame) -> list[dict[str, Any]]:
    """Return the rows with what a tracker shows: `name`, `baseline` (its name) and `tags`, `precision=O1`."""
    names = names_by_id(cells)
    groups = [c for c in varying_columns(cells) if c in CHOICES]
    rows = [{str(key): value for key, value in row.items()} for row in cells.to_dict("records")]
    return [
        row
        | {
            "name": names[row["cell_id"]],
            "baseline": names.get(str(row.get("baseline_cell_id")), ""),
            "tags": [f"{c}={plain(row[c])}" for c in groups],
        }
        for row in rows
    ]
