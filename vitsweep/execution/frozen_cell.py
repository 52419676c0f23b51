"""`cell.yaml`: written when a sweep is made, and all that a worker reads about its cell."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import cell_from_tree


def frozen_document(
    cell: CellSpec, tree: Mapping[str, Any], overrides: tuple[str, ...], code: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `cell.yaml`.

    Args:
        cell: the spec.
        tree: the resolved tree it was built from.
        overrides: what to type to get this cell.
        code: git commit, diff and package versions when the sweep was made.
    """
    parts = {name: tree[name] for name in vars(cell)}
    return {
        "cell_id": cell.cell_id,
        "overrides": list(overrides),
        "cell": parts,
        "code": dict(code),
    }


def read_cell(store: Store, cell_id: str, measurement: Mapping[str, Any] | None = None) -> CellSpec:
    """Build the spec of a frozen cell.

    Args:
        store: of the sweep.
        cell_id: the cell.
        measurement: fields of `measurement` that belong to the command that runs the cell (see
            `Measurement.of_command`); those of the command that froze it where not given.
    """
    cell = cell_from_tree(store.frozen(cell_id)["cell"])
    if not measurement:
        return cell
    return replace(cell, measurement=replace(cell.measurement, **measurement))
