"""Why one cell of a sweep is faster than another, as table, figure and sentence."""

from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import causes, style
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.results.store import Store, sweep_argument
from vitsweep.tables.causes import Explanation, explain_cells, find_cell
from vitsweep.tables.names import cell_names
from vitsweep.tables.sweep_tables import SweepTables


@dataclass(frozen=True, eq=False)
class Explained:
    """Why one cell is faster than another, as table, figure and sentence.

    Attributes:
        explanation: causes with intervals, see `tables.causes.Explanation`.
        store: where the runs are.
    """

    explanation: Explanation
    store: Store

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return self.explanation.sentence

    @property
    def table(self) -> DataFrame:
        """One row per cause: milliseconds per step with a 95 % interval."""
        return self.explanation.causes

    @property
    def figure(self) -> Figure:
        """The picture of causes."""
        return style.freeze_layout(causes.draw(causes.rows_of([self.explanation])))

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.sentence)}</p>{style.to_svg(self.figure)}"


def explain_stored(store: Store, a: str, b: str, least_blocks: int = 1) -> Explained | None:
    """Return why cell A is faster than cell B from stored traces alone; None where blocks lack.

    Raises:
        BadValueError: a text names no cell of the sweep, or several.
    """
    tables = SweepTables.of(store)
    first, second = (find_cell(tables.cells, text) for text in (a, b))
    if first == second:
        raise BadValueError(f"`{a}` and `{b}` are the same cell of `{store.name}`.")
    labels = dict(zip(tables.cells["cell_id"], cell_names(tables.cells), strict=True))
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
