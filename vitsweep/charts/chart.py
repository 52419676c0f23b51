"""What a chart is: the table it draws, the drawing, and how to read it."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.sweep_tables import SweepTables

NOTHING = DataFrame()

HOLLOW = "Hollow or hatched: oversubscribed, so nothing is said about scaling."


@dataclass(frozen=True)
class Chart:
    """One chart of the report; a file of this folder names its own `CHART`.

    Attributes:
        title: heading.
        table: tables of a sweep -> the table that is drawn; empty where there is nothing to draw.
        draw: table -> figure.
        reading: how to read it, the first sentences of the caption; may depend on the table.
    """

    title: str
    table: Callable[[SweepTables], DataFrame]
    draw: Callable[[DataFrame], Figure]
    reading: str | Callable[[DataFrame], str]

    @property
    def name(self) -> str:
        """Name of the file that defines it, and of its pictures."""
        return self.table.__module__.rpartition(".")[2]


def mixed(cells: DataFrame) -> bool:
    """Return whether the measured cells ran on several kinds of device."""
    measured = cells[cells["status"] == Status.measured]
    return "device" in measured and measured["device"].nunique() > 1
