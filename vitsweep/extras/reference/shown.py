"""What terminal, report and `doctor` show of records of another machine beside those of a sweep."""

from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup
from pandas import DataFrame
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from vitsweep.extras import KNOWN
from vitsweep.extras.reference.records import FACTS
from vitsweep.report.html import rendered
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, missing, number
from vitsweep.tables.names import names_by_id
from vitsweep.tables.render import TextTable
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables

SLOW, FEWEST_CELLS = 0.9, 3
"""A median quotient below it, of so many cells at least, is told in a sentence."""
MOST_ROWS = 10_000


def beside(tables: SweepTables) -> DataFrame:
    """Return the cells that `sweep.reference` has measured on the same kind of GPU.

    A row has what is shown of the cell, the columns of the record with `_there`, `source` and `quotient`,
    images per second here over those there. Rows of the latest command count.
    """
    kept = [row for command in tables.commands for row in command.get("reference") or ()]
    there = DataFrame({row["cell_id"]: row for row in kept[-MOST_ROWS:] if _is_row(row)}.values())
    there = there.reindex(columns=["cell_id", "source", *FACTS])
    cells = tables.cells[tables.cells["status"] == Status.measured]
    here = cells.reindex(columns=["cell_id", *FACTS, "shared_device"])
    found = here.astype({"device": object, "cell_id": object}).merge(
        there.add_suffix("_there").rename(columns={"source_there": "source"}),
        left_on=["cell_id", "device"],
        right_on=["cell_id_there", "device_there"],
    )
    return found.assign(quotient=found["images_per_second"] / found["images_per_second_there"])


def _is_row(row: Any) -> bool:
    """Whether an entry of a command, which somebody else may have written, is one of `records.kept`."""
    texts, rate = ("cell_id", "source", "device"), "images_per_second"
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(key), str) for key in texts)
        and isinstance(row.get(rate), int | float)
        and row[rate] > 0
        and all(isinstance(row.get(key, kind()), kind | int) for key, kind in FACTS.items())
    )


def beside_text(table: DataFrame, names: Mapping[str, str]) -> DataFrame:
    """Return the table of `beside` as text.

    Args:
        table: of the cells.
        names: id -> name of a cell.
    """
    rows = table.to_dict("records")
    return DataFrame(
        {
            "cell": [names.get(row["cell_id"], row["cell_id"]) for row in rows],
            "img/s here": [number(row["images_per_second"]) for row in rows],
            "img/s there": [number(row["images_per_second_there"]) for row in rows],
            "here / there": [f"{row['quotient']:.2f}" for row in rows],
            "torch here": [_minor(row["torch"]) for row in rows],
            "torch there": [_minor(row["torch_there"]) for row in rows],
        },
        dtype=str,
    )


def _minor(version: Any) -> str:
    return "" if missing(version) else ".".join(str(version).split(".")[:2])


def slow(table: DataFrame) -> str:
    """Return one sentence where this machine is slower than the records; "" where it is not shown to be."""
    median = table["quotient"].median()
    if len(table) < FEWEST_CELLS or not median < SLOW:
        return ""
    found = {"source": table["source"].iloc[-1], "device": table["device"].iloc[-1]}
    cells, causes = count(len(table), "cell"), "; ".join(_to_look_at(table))
    return say("reference_slow", quotient=f"{median:.2f}", cells=cells, look_at=causes, **found)


def _to_look_at(table: DataFrame) -> Iterator[str]:
    """Yield clocks, power limit, other processes and driver with what the records have of them."""
    here, there = (
        [table[f"{column}{side}"].dropna() for column in ("sm_clock_mhz", "power_capped_share")]
        for side in ("", "_there")
    )
    yield f"clocks ({_both(*(f'{s[0].median():,.0f} MHz' * bool(len(s[0])) for s in (here, there)))})"
    shares = (f"{s[1].median():.0%} of the time" * bool(len(s[1])) for s in (here, there))
    yield f"power limit (reached: {_both(*shares)})"
    shared = int(table["shared_device"].eq(True).sum())
    yield f"other processes (seen beside {shared} of {count(len(table), 'cell')})"
    drivers = (", ".join(dict.fromkeys(table[c].dropna())) for c in ("driver", "driver_there"))
    yield f"driver ({_both(*drivers)})"


def _both(here: str, there: str) -> str:
    return f"{here or 'not recorded'} here, {there or 'not recorded'} there"


def section(tables: SweepTables) -> Markup:
    """Return the table of a report and its sentence; "" where no record is of these cells and GPUs."""
    found = beside(tables)
    if found.empty:
        return Markup("")
    text = beside_text(found, names_by_id(tables.cells))
    context = {"beside": text.to_dict("split"), "common": _common(found), "slow": slow(found)}
    return Markup(rendered("reference.html.j2", context, "vitsweep.extras.reference"))


def _common(table: DataFrame) -> str:
    sources, devices = (", ".join(dict.fromkeys(table[c])) for c in ("source", "device"))
    return f"there: {sources}, on {devices}"


class ReferenceTable:
    """What a terminal shows below the table of the cells; empty where there is nothing to compare."""

    def __init__(self, tables: SweepTables) -> None:
        self.table, self.names = beside(tables), names_by_id(tables.cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the cells with both figures, and the sentence."""
        if len(self.table):
            heading = f"\n{KNOWN['reference'].heading}\n{_common(self.table)}"
            yield TextTable(beside_text(self.table, self.names), heading)
            yield Text("\n".join(filter(None, (slow(self.table), ""))))
