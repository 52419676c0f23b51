"""Published figures with their sources, and how to show them next to measured rows."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from io import StringIO
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables.formatting import (
    missing,
    number,
    percent,
    plain,
    ratio,
    status_words,
)
from vitsweep.tables.names import names_by_id

SURENESS = {
    "primary": "text of the repository, pull request, README or paper itself",
    "primary_image": "a table or labelled chart published as an image, transcribed by eye",
    "secondary": "read in a text that quotes the source",
    "abstract_only": "only the abstract was available",
    "digitised": "measured off a plot without value labels, about 2 % off",
}
"""Values of the column `sure`, the most reliable first."""

_GPUS = re.compile(r"^(\d+)x([A-Za-z]\w*(?:-\w+)*)")
_NAMED = re.compile(r"^([A-Za-z_]+)[ =](\d[\w.]*)$")
_COUNT = re.compile(r"^([\d,]+) (?:GPUs?|AMD \w+|H100|V100)\b")


def published(
    source: str = "", experiment: str = "", metric: str = "", doubtful: bool = False
) -> DataFrame:
    """Return published figures: `source, system, experiment, metric, value, number, unit, ...`.

    `value` is the text as printed, `number` its value where it is one number. `sure` is a key
    of `SURENESS`, `where` names the page or line that was read. Figures whose labels are doubtful in
    their own source are left out unless `doubtful`; then `doubt` says why.

    Args:
        source: regular expression that the source must contain; the same for the next two.
        experiment: as `source`.
        metric: as `source`.
        doubtful: return doubtful figures as well.
    """
    table = _all()
    for column, pattern in (("source", source), ("experiment", experiment), ("metric", metric)):
        table = table[table[column].str.contains(pattern, regex=True)]
    return (table if doubtful else table[table["doubt"].isna()]).reset_index(drop=True)


def with_conditions(table: DataFrame) -> DataFrame:
    """Add the conditions as columns: `gpus, gpu` and every `name value` of the text.

    A length such as `64K` becomes 65,536: taken in powers of two, which the sources do not state.
    """
    parsed = DataFrame([conditions(text) for text in table["conditions"]], index=table.index)
    return table.join(parsed[[c for c in parsed if c not in table]])


def conditions(text: str) -> dict[str, str | int]:
    """Return `{gpus: 16, gpu: A800, seq: 65536, tp: 1}` from `16xA800 (2 nodes); seq 64K; tp 1`."""
    found: dict[str, str | int] = {}
    for part in map(str.strip, text.split(";")):
        if match := _GPUS.match(part):
            found |= {"gpus": int(match[1]), "gpu": match[2]}
        elif match := _COUNT.match(part):
            found |= {"gpus": int(match[1].replace(",", ""))}
        elif match := _NAMED.match(part):
            found[match[1]] = _whole(match[2])
    return found


@cache
def _all() -> DataFrame:
    text = files("vitsweep.extras.published").joinpath("published.csv").read_text(encoding="utf-8")
    table = pd.read_csv(StringIO(text), dtype=str).assign(
        conditions=lambda t: t["conditions"].fillna(""), unit=lambda t: t["unit"].fillna("")
    )
    return table.assign(number=pd.to_numeric(table["value"], errors="coerce"))


def _whole(text: str) -> str | int:
    match = re.fullmatch(r"(\d+)([KM]?)", text)
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]] if match else text


# The figures that a sweep names under `sweep.published`, next to its cells.


Entry = Mapping[str, Any]
"""`figures`: columns of the figures and their values, conditions among them. `column`: what was measured.
`cell`: columns of the cell that matches and their values, `$sp` for the condition `sp` of a figure.
`conditions`: further columns as the source has them, null where it is not known; `baseline.` of the baseline.
"""

_KEYS = {"figures": dict, "column": str, "cell": dict, "conditions": dict}
NOT_HERE = "not measured here"
MOST_FIGURES = 200
"""More are not read from one sweep folder, which somebody else may have written."""


def problems(entries: Iterable[Entry]) -> list[str]:
    """Say which entries of `sweep.published` are refused, and why."""
    return [*filter(None, map(entry_problem, entries))]


def kept(plan: object, entries: Iterable[Entry]) -> list[Entry]:
    """Return what the line of a command keeps of `sweep.published`: all of it."""
    return [*entries]


def entry_problem(entry: Entry) -> str:
    """Return why an entry of `sweep.published` is refused; empty if it is not."""
    if not _is_entry(entry):
        return (
            f"`sweep.published=[{entry}]` must be sections of {', '.join(f'`{k}`' for k in _KEYS)}, as in "
            "`conf/sweep/meta_speedups.yaml`."
        )
    if _chosen(entry).empty:
        return (
            f"`sweep.published` names {dict(entry['figures'])}, which no row of "
            "`vitsweep/extras/published/published.csv` has: take the values of its columns and conditions."
        )
    return ""


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and entry.keys() == _KEYS.keys()
        and all(isinstance(entry[key], kind) for key, kind in _KEYS.items())
        and bool(entry["figures"] and entry["cell"])
    )


def _chosen(entry: Entry) -> DataFrame:
    return _fitting(_with_all_conditions(), entry["figures"])


def _fitting(table: DataFrame, wanted: Mapping[str, Any]) -> DataFrame:
    """Return the rows whose columns have these values as text; none where a column is missing."""
    for column, value in wanted.items():
        texts = table[column].astype(object).map(plain) if column in table else ""
        table = table[Series(texts, table.index) == plain(value)]
    return table


@cache
def _with_all_conditions() -> DataFrame:
    return with_conditions(published())


def beside_cells(cells: DataFrame, entries: Iterable[Entry]) -> DataFrame:
    """Return the figures that entries of `sweep.published` name, each next to the cells that match.

    A row has the columns of `published`, `cell_id`, the name of the measured `column`, its `measured` value
    with `measured_low` and `measured_high`, `note` (the claim, or why there is no value), and two lists:
    `differs`, the conditions of the source that are not those of the cell, and `unknown`, those that are not
    known of it. A figure whose cell is not in the table has a row of its own, "not measured here". Entries
    that are malformed are left out.

    Args:
        cells: one row per cell.
        entries: of `sweep.published`.
    """
    rows: list[dict[Any, Any]] = []
    bases = cells[cells["cell_id"].isin(cells.get("baseline_cell_id", ()))]
    known = dict(zip(bases["cell_id"], bases.to_dict("records"), strict=True))
    for entry in filter(_is_entry, entries):
        for figure in _chosen(entry).head(MOST_FIGURES).to_dict("records"):
            wanted = {c: _taken(value, figure) for c, value in entry["cell"].items()}
            asked = {c: _taken(v, figure) for c, v in entry["conditions"].items()}
            there = {c: v for c, v in asked.items() if v is not None}
            shown = figure | {
                "column": entry["column"],
                "unknown": [c for c, v in asked.items() if v is None],
            }
            partners = _fitting(cells, wanted).to_dict("records")
            for cell in partners:
                base = known.get(cell.get("baseline_cell_id"), {})
                here = {c: _here(c, cell, base) for c in there}
                rows.append(shown | _measured(cell, entry["column"]) | {"differs": [
                    f"{c} {plain(v)}, here {here[c] or 'unknown'}"
                    for c, v in there.items() if plain(v) != here[c]
                ]})  # fmt: skip
            if not partners:
                needs = [f"{c} {plain(v)}" for c, v in (wanted | there).items()]
                rows.append(shown | {"note": NOT_HERE, "differs": needs})
        if len(rows) >= MOST_FIGURES:
            break
    columns = [*published().columns, "cell_id", "column", "measured", "measured_low"]
    columns += ["measured_high", "note", "differs", "unknown"]
    table = DataFrame(rows[:MOST_FIGURES]).reindex(columns=columns)
    return table.sort_values("cell_id", key=Series.isna, kind="stable", ignore_index=True)


def _taken(value: Any, figure: Mapping[Any, Any]) -> Any:
    """Return a value of an entry; `$sp` is that of the condition `sp`."""
    return figure.get(value[1:]) if str(value).startswith("$") else value


def _measured(cell: Mapping[Any, Any], column: str) -> dict[str, Any]:
    value = cell.get(column)
    if missing(value) or not isinstance(value, int | float):
        status = cell["status"]
        is_run = not missing(status) and status != Status.measured
        return {"cell_id": cell["cell_id"], "note": status_words(status) if is_run else NOT_HERE}
    ends = {f"measured_{end}": cell.get(f"{column}_{end}") for end in ("low", "high")}
    claim = plain(cell.get("claim")) if column == "speedup" else ""
    return {"cell_id": cell["cell_id"], "measured": value, **ends, "note": claim}


def _here(column: str, cell: Mapping[Any, Any], base: Mapping[Any, Any]) -> str:
    own = column.removeprefix("baseline.")
    return plain((cell if own == column else base).get(own))


def with_published(cells: DataFrame, figures: DataFrame, column: str) -> DataFrame:
    """Add `published` and `published_by`, the first figure next to a cell's `column` and its source.

    `attrs["unmeasured"]` has name, figure, reason and source of those that stand next to nothing.
    """
    shown = figures[figures["column"] == column]
    is_measured = shown["measured"].notna()
    first = shown[is_measured].drop_duplicates("cell_id").set_index("cell_id")
    found = {"published": first["number"], "published_by": first["source"]}
    table = cells.assign(**{c: cells["cell_id"].map(known) for c, known in found.items()})
    alone = (
        shown.assign(cell=_names(shown, cells))
        .loc[~is_measured, ["cell", "number", "note", "source"]]
        .dropna()
    )
    table.attrs["unmeasured"] = alone.to_numpy().tolist()
    return table


def _names(figures: DataFrame, cells: DataFrame) -> Series:
    """Return the name of each figure's cell; of one that is not planned that of the experiment."""
    return figures["cell_id"].map(names_by_id(cells)).fillna(figures["experiment"])


def beside_text(table: DataFrame, cells: DataFrame) -> tuple[DataFrame, str]:
    """Return the table of `beside_cells` as text, and what all of its rows have in common, a line each.

    Args:
        table: of the figures.
        cells: that they stand next to; their names are shown.
    """
    if table.empty:
        return DataFrame(), ""
    sources = zip(table["source"], table["sure"], strict=True)
    lists: dict[str, list[list[str]]] = {
        "source": [
            [f"{source} ({sure.replace('_', ' ')}: {SURENESS[sure]})"] for source, sure in sources
        ],
        "what differs": table["differs"].tolist(),
        "unknown there": table["unknown"].tolist(),
    }
    common = {h: [p for p in rows[0] if all(p in row for row in rows)] for h, rows in lists.items()}
    columns = {
        "cell": _names(table, cells).tolist(),
        "published": [_figure(*v) for v in zip(table["value"], table["unit"], strict=True)],
        "measured here": [_beside(row) for row in table.to_dict("records")],
        "as published": table["conditions"].tolist(),
    }
    for head, rows in lists.items():
        columns[head] = ["; ".join(p for p in row if p not in common[head]) for row in rows]
    text = DataFrame(columns, table.index, dtype=str)
    told = [f"{head}: {'; '.join(parts)}" for head, parts in common.items() if parts]
    return text.loc[:, (text != "").any()], "\n".join(told)


def _figure(value: str, unit: str) -> str:
    return f"{value}x (no interval)" if unit == "x" else f"{value} {unit}".strip()


def _beside(row: Mapping[Any, Any]) -> str:
    if missing(row["measured"]):
        return str(row["note"])
    value, ends = row["measured"], (row["measured_low"], row["measured_high"])
    if row["unit"] == "x":
        return ", ".join(filter(None, [ratio(value, *ends), row["note"]]))
    metric = METRICS.get(row["column"])
    unit = "" if metric is None or metric.unit == "1" else f" {metric.unit}"
    return percent(value) if row["unit"] == "%" else f"{number(value)}{unit}"
