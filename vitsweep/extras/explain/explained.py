"""Why one cell of a sweep is faster than another, as table, figure and sentence."""

from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.explain.causes import Explanation, explain_cells
from vitsweep.extras.explain.charts import causes
from vitsweep.extras.explain.roofline import CellRoofline, cell_roofline
from vitsweep.results.store import Store
from vitsweep.results.sweeps import sweep_argument
from vitsweep.tables.names import find_cell, names_by_id
from vitsweep.tables.sweep_tables import SweepTables


@dataclass(frozen=True, eq=False)
class Explained:
    """Why one cell is faster than another, or where its time goes, as table, figure and sentence.

    Attributes:
        explanation: `Explanation` of two cells, `CellRoofline` of one.
        store: where the runs are.
    """

    explanation: Explanation | CellRoofline
    store: Store

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return self.explanation.sentence

    @property
    def table(self) -> DataFrame:
        """One row per cause, milliseconds per step with a 95 % interval; of one cell, a row per phase."""
        return self.explanation.causes

    @property
    def figure(self) -> Figure:
        """The picture of causes, or the roofline of one cell."""
        found = self.explanation
        if isinstance(found, Explanation):
            return style.freeze_layout(causes.draw(causes.rows_of([found])))
        return style.freeze_layout(found.figure)

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.sentence)}</p>{style.to_svg(self.figure)}"


def explain_of(store: Store, a: str, b: str | None = None) -> Explained:
    """Say why cell A takes another time per step than cell B, from stored traces.

    Args:
        store: of the sweep.
        a: a cell, named as in `speedups`, by settings (`precision=O2`), or by its id.
        b: the cell that it is compared with; without, the roofline of A.

    Raises:
        VitsweepError: a text names no cell, or no block has traced steps of both; the text says which
            command measures some.
    """
    if b is None:
        return explain_cell(store, a)
    found = explain_stored(store, a, b)
    if found is None:
        raise lacking(store, a, b)
    return found


def explain_cell(store: Store, a: str) -> Explained:
    """Return the roofline of one cell.

    Raises:
        BadValueError: the text names no cell of the sweep, or several.
        VitsweepError: its phases or FLOPs were not measured.
    """
    cells = SweepTables.of(store).cells
    cell_id = find_cell(cells, a)
    [row] = (row for _, row in cells[cells["cell_id"] == cell_id].tail(1).iterrows())
    return Explained(cell_roofline(names_by_id(cells)[cell_id], row), store)


def explain_stored(store: Store, a: str, b: str, least_blocks: int = 1) -> Explained | None:
    """Return why cell A is faster than cell B from stored traces alone; None where blocks lack.

    Raises:
        BadValueError: a text names no cell of the sweep, or several.
    """
    tables = SweepTables.of(store)
    first, second = (find_cell(tables.cells, text) for text in (a, b))
    if first == second:
        raise BadValueError(f"`{a}` and `{b}` are the same cell of `{store.name}`: name two.")
    labels = names_by_id(tables.cells)
    try:
        found = explain_cells(tables, first, second, (labels[first], labels[second]))
    except VitsweepError:
        return None
    return Explained(found, store) if found.num_blocks >= least_blocks else None


def lacking(store: Store, a: str, b: str) -> VitsweepError:
    """Return the error of a pair whose traces lack, with the command that measures them."""
    return VitsweepError(
        f"No block of `{store.name}` has traced steps of both `{a}` and `{b}`: `python -m vitsweep explain "
        f"'{a}' '{b}' --sweep {sweep_argument(store)}` measures some."
    )
