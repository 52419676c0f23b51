"""The step of a cell of vitsweep, where the code under judgment is its model, or vitsweep itself."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitsweep.api.apply import Applied, apply
from vitsweep.execution.run_request import read_cell
from vitsweep.model.build import build_model
from vitsweep.results.store import Store

if TYPE_CHECKING:
    from vitsweep.judging.rank import Cell


def make_step(cell: "Cell") -> Applied:
    """Build the cell's model in this process, and put its techniques around it."""
    path = Path(cell)
    spec = read_cell(Store(path.parents[2]), path.parent.name)
    return apply(path, build_model(spec))
