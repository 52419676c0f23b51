"""The table people read: text only, the same in terminal, Markdown and HTML."""

from collections.abc import Callable

from pandas import DataFrame, Series
from rich.table import Table
from rich.text import Text

from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.columns import varying
from vitsweep.tables.names import cell_names

COLOURS = {"faster": "green", "slower": "red", "baseline": "bold", "no difference shown": "dim"}

MANY = 4
"""More columns than these push the results out of a terminal."""

Reader = Callable[[Series], str]


def presented(cells: DataFrame, wide: bool = False) -> DataFrame:
    """Return the cells as text: what varies, img/s, speedup, claim, step ms, peak GiB, status.

    The order is that of `ranked`; columns that hold nothing are left out. Where more than `MANY`
    columns vary, one column `cell` says what a cell changes, and the columns themselves come last,
    if `wide`. What varies is told from the whole table: present a part of it after, not before.
    """
    named = varying(cells) or [c for c in ("model", "precision", "sharding") if c in cells]
    ordered = ranked(cells.assign(_name=cell_names(cells)))
    choices = {c: _plain(c) for c in named}
    many: dict[str, Reader] = {"cell": _plain("_name")} | _MEASURED | (choices if wide else {})
    readers = many if len(named) > MANY else choices | _MEASURED
    text = DataFrame(
        {name: [reader(row) for _, row in ordered.iterrows()] for name, reader in readers.items()},
        index=ordered.index,
        dtype=str,
    )
    return text.loc[:, [c for c in text if c in _ALWAYS or (text[c] != "").any()]]


def ranked(cells: DataFrame) -> DataFrame:
    """Return the cells with the largest speedup first, then throughput; the unmeasured last."""
    keys = [c for c in ("speedup", "images_per_second") if c in cells]
    order = cells.assign(_last=cells["status"] != Status.measured)
    ascending = [True] + [False] * len(keys)
    return order.sort_values(["_last", *keys], ascending=ascending, kind="stable").drop(
        columns="_last"
    )


def printed(cells: DataFrame, title: str | None = None) -> Table:
    """Return the table for a terminal, coloured by claim."""
    return as_table(presented(cells), title, _style)


def as_table(
    text: DataFrame, title: str | None = None, style: Callable[[dict[str, str]], str] = lambda _: ""
) -> Table:
    """Return a table of text for a terminal; `style` gives the colour of a row."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in text:
        right = name in NUMERIC
        table.add_column(str(name), justify="right" if right else "left", overflow="fold")
    for row in text.astype(str).to_dict("records"):
        values = {str(column): value for column, value in row.items()}
        table.add_row(*(Text(value, style=style(values)) for value in values.values()))
    return table


def _style(row: dict[str, str]) -> str:
    return COLOURS.get(
        row.get("claim", ""), "" if row["status"].startswith("measured") else "yellow"
    )


def markdown(text: DataFrame) -> str:
    """Return a table of text as GitHub Markdown."""
    lines = [
        list(map(str, text.columns)),
        ["---"] * len(text.columns),
        *text.astype(str).to_numpy().tolist(),
    ]
    return (
        "\n".join("| " + " | ".join(v.replace("|", "\\|") for v in line) + " |" for line in lines)
        + "\n"
    )


def peak_gib(row: Series) -> float | None:
    """Return the peak of the worst rank in GiB: allocated on a GPU, resident on CPU."""
    peaks = [row[c] for c in ("peak_allocated_gib", "peak_rss_gib") if c in row]
    return next((float(p) for p in peaks if not formatting.missing(p)), None)


def _plain(column: str) -> Reader:
    return lambda row: formatting.plain(row[column])


_MEASURED: dict[str, Reader] = {
    "img/s": lambda row: formatting.number(row.get("images_per_second")),
    "speedup": formatting.speedup,
    "claim": formatting.claim,
    "step ms": lambda row: formatting.number(row.get("step_time_ms")),
    "peak GiB": lambda row: formatting.number(peak_gib(row)),
    "top-1": lambda row: formatting.percent(row.get("accuracy_top1")),
    "blocks": lambda row: "" if formatting.missing(row.get("blocks")) else str(int(row["blocks"])),
    "status": formatting.status,
}
_ALWAYS = ("cell", "img/s", "speedup", "status")
NUMERIC = ("img/s", "speedup", "step ms", "peak GiB", "top-1", "blocks")
