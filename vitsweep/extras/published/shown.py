"""What terminal, report and chart show of published figures."""

from dataclasses import dataclass

from markupsafe import Markup
from pandas import DataFrame
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from vitsweep.extras.published.figures import (
    beside_cells,
    beside_text,
    with_published,
)
from vitsweep.report.html import rendered
from vitsweep.tables.formatting import count
from vitsweep.tables.render import BEST, TextTable
from vitsweep.tables.sweep_tables import SweepTables


def figures_of(tables: SweepTables) -> DataFrame:
    """Return the figures that the commands of a sweep name, next to the cells that match."""
    named = {str(e): e for command in tables.commands for e in command.get("published") or ()}
    return beside_cells(tables.settings, named.values())


def marked(tables: SweepTables, column: str) -> DataFrame:
    """Return the cells with the figures that stand next to a column."""
    return with_published(tables.settings, figures_of(tables), column)


def section(tables: SweepTables) -> Markup:
    """Return the table of a report; "" where the sweep names no figures."""
    figures = figures_of(tables)
    beside, common = beside_text(figures, tables.settings)
    if beside.empty:
        return Markup("")
    context = {"beside": beside.to_dict("split"), "common": common}
    return Markup(rendered("published.html.j2", context, "vitsweep.extras.published"))


def below(tables: SweepTables) -> "PublishedTable":
    """Return what a terminal shows below the table of the cells."""
    return PublishedTable(figures_of(tables), tables.settings)


@dataclass(frozen=True)
class PublishedTable:
    """Published figures that a sweep names, and what it measured; empty where it names none.

    Attributes:
        figures: of `figures.beside_cells`.
        cells: the cells that the figures are compared with.
    """

    figures: DataFrame
    cells: DataFrame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what all figures have in common, and a row for each of the first."""
        text, common = beside_text(self.figures, self.cells)
        if len(text):
            rows = text.head(BEST).drop(columns="as published", errors="ignore")
            yield TextTable(rows, f"\nPublished and measured\n{common}")
            if len(text) > BEST:
                yield Text(f"{count(len(text) - BEST, 'more figure')} in the report.")
            yield Text()
