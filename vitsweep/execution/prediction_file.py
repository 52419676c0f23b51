"""What was predicted for a cell, kept in its folder from before it runs until its record is written."""

import json
from collections.abc import Mapping
from pathlib import Path

from vitsweep.files import write_atomically

NAME = "prediction.json"
PREFIX = "predicted_"


def write_prediction(cell_folder: Path, columns: Mapping[str, float | None]) -> None:
    """Keep the predicted columns of a cell.

    Args:
        cell_folder: of the cell; it exists.
        columns: metric -> predicted value.

    Raises:
        OSError: the folder cannot be written.
    """
    tree = {PREFIX + name: value for name, value in columns.items()}
    write_atomically(cell_folder / NAME, json.dumps(tree, indent=1))


def read_prediction(cell_folder: Path) -> dict[str, float | None]:
    """Return `predicted_<metric>` -> value; empty where nothing was predicted."""
    try:
        tree = json.loads((cell_folder / NAME).read_text(encoding="utf-8"))
        return {str(name): None if value is None else float(value) for name, value in tree.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
