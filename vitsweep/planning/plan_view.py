"""The table of a plan in a terminal, and what stands below it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep.errors import BadValueError, did_you_mean
from vitsweep.tables.formatting import number, plain
from vitsweep.tables.reasons import reason_lines
from vitsweep.tables.terminal import as_table

MB = 1e6
NOT_COLUMNS = ("settings", "reasons", "cell_id", "is_baseline")


def show_plan(
    rows: Sequence[Mapping[str, Any]], title: str, columns: Sequence[str], console: Console
) -> None:
    """Print the cells, then the reasons of those that do not run.

    Args:
        rows: of the plan, with or without predictions.
        title: above the table.
        columns: names of columns to show, `all` below each cell; empty for the most important ones.
        console: where to print.

    Raises:
        BadValueError: there is no such column.
    """
    shown = [row for row in rows if not row["reasons"]]
    if columns and tuple(columns) != ("all",):
        text = [_named(row, _known(columns, rows)) for row in shown]
    else:
        text = [_short(row) for row in shown]
    if shown:
        table = DataFrame(text).fillna("")
        console.print(as_table(table.loc[:, (table != "").any()], title))
    else:
        console.print(title, highlight=False, markup=False)
    if tuple(columns) == ("all",):
        for row in shown:
            console.print(f"\n{row['cell']}", highlight=False, style="bold")
            for name, value in row.items():
                if name not in NOT_COLUMNS and value is not None:
                    console.print(f"  {name:34} {_text(value)}", highlight=False)
    reasons = [f"{row['state']}: {' '.join(row['reasons'])}" * bool(row["reasons"]) for row in rows]
    for line in reason_lines([row["settings"] for row in rows], reasons):
        console.print(line, highlight=False, markup=False)
    counts = Counter(row["state"] for row in rows)
    console.print(
        " · ".join(f"{state} {count}" for state, count in counts.items()), highlight=False
    )


def _short(row: Mapping[str, Any]) -> dict[str, str]:
    text = {
        "cell": _cell(row),
        "state": row["state"],
        "runs": str(row["runs"] or ""),
    }
    if "peak_gib" not in row:
        return text
    sent = sum(row[f"{what}_bytes_per_step"] for what in ("parameter", "gradient", "activation"))
    text |= {"peak GiB": number(row["peak_gib"], 2), "sent MB": number(sent / MB, 2)}
    if "step_time_ms" in row:
        low, high = (number(row[f"step_time_{end}_ms"], 2) for end in ("low", "high"))
        text |= {
            "step ms": f"{number(row['step_time_ms'], 2)} [{low}, {high}]",
            "img/s": number(row["images_per_second"], 2),
        }
    return text


def _cell(row: Mapping[str, Any]) -> str:
    return str(row["cell"]) + (" (baseline)" if row["is_baseline"] else "")


def _named(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    return {"cell": _cell(row), **{name: _text(row.get(name)) for name in columns}}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return number(value, 4)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else plain(value)


def _known(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    known = dict.fromkeys(n for row in rows for n in row if n not in NOT_COLUMNS)
    for name in columns:
        if name not in known:
            raise BadValueError(
                f"`--columns {name}`: there is no such column; there are {', '.join(known)}."
                + did_you_mean(name, list(known), lambda other: f"--columns {other}")
            )
    return columns
