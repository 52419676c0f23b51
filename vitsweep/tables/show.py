"""The result table as text, for terminal, Markdown and HTML, and the table of unmeasured cells."""

from collections.abc import Callable

from pandas import DataFrame, Series
from rich.table import Table
from rich.text import Text

from vitsweep.results.metrics import COLUMN_OF, HEADINGS
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.columns import varying
from vitsweep.tables.names import cell_names

COLOURS = {"faster": "green", "slower": "red", "baseline": "bold", "no difference shown": "dim"}

MANY = 4
"""With more varying columns than this the results no longer fit a terminal."""

Reader = Callable[[Series], str]


def presented(cells: DataFrame, wide: bool = False) -> DataFrame:
    """Return the cells as text: the varying columns, img/s, speedup, claim, step ms, ..., status.

    The rows are in the order of `ranked`; empty columns are left out. Where more than `MANY`
    columns vary, one column `cell` names what a cell changes, and with `wide` the varying columns
    follow at the end. Which columns vary is decided on the rows given: to show some cells of a
    sweep, present the whole table first and select rows afterwards.
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
        right = name in COLUMN_OF
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
    """Return the peak memory of the worst rank in GiB: allocated on a GPU, resident on CPU."""
    peaks = [row[c] for c in ("peak_allocated_gib", "peak_rss_gib") if c in row]
    return next((float(p) for p in peaks if not formatting.missing(p)), None)


def _plain(column: str) -> Reader:
    return lambda row: formatting.plain(row[column])


_MEASURED: dict[str, Reader] = {
    HEADINGS["images_per_second"]: lambda row: formatting.number(row.get("images_per_second")),
    HEADINGS["speedup"]: formatting.speedup,
    "claim": formatting.claim,
    HEADINGS["step_time_ms"]: lambda row: formatting.number(row.get("step_time_ms")),
    HEADINGS["peak_gib"]: lambda row: formatting.number(peak_gib(row)),
    HEADINGS["accuracy_top1"]: lambda row: formatting.percent(row.get("accuracy_top1")),
    HEADINGS["blocks"]: lambda row: (
        "" if formatting.missing(row.get("blocks")) else str(int(row["blocks"]))
    ),
    "status": formatting.status,
}
_ALWAYS = ("cell", HEADINGS["images_per_second"], HEADINGS["speedup"], "status")


def coverage(cells: DataFrame) -> DataFrame:
    """Return one row per cell without a measurement: what varies, status, reason, rank, cell id.

    A cell of the sweep that was never run has the status `not run`.
    """
    absent = cells.assign(cell=cell_names(cells))[cells["status"] != Status.measured]
    named = varying(cells)
    named = ["cell"] if len(named) > MANY else named
    columns = [*named, "status", "reason", "failed_rank", "attempt", "cell_id"]
    return (
        absent.assign(status=[formatting.plain(s) or "not run" for s in absent["status"]])
        .reindex(columns=columns)
        .assign(reason=lambda t: t["reason"].map(formatting.plain).astype(str))
        .sort_values("status", kind="stable")
    )


def counts(cells: DataFrame) -> DataFrame:
    """Return the number of cells per status, `status, num_cells`, measured cells first."""
    status = cells["status"].map(lambda s: "not run" if formatting.missing(s) else str(s))
    tally = status.value_counts().rename_axis("status").rename("num_cells").reset_index()
    return tally.sort_values("status", key=lambda s: s != Status.measured, kind="stable")
