"""The result table as text, for Markdown and HTML, and the table of unmeasured cells."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, heading, own_metrics
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.names import cell_names, varying
from vitsweep.tables.valid_runs import checked_cells

MANY = 4
"""With more varying columns than this one column names the cells."""

FAMILY = "among all"
"""Heading of the interval that belongs to the claim among all cells of its family."""

DIFFERENCE, ACCURACY = "top-1 - baseline's", "accuracy"
"""Headings of the difference from the baseline's accuracy, and of the claim about it."""

Column = Callable[[DataFrame], list[str]]
"""Ranked cells -> the texts of one column."""


def presented(cells: DataFrame, wide: bool = False) -> DataFrame:
    """Return the cells as text: the varying columns, img/s, speedup, claim, status, step ms, ...

    The rows are in the order of `ranked`; empty columns are left out. Where more than `MANY`
    columns vary, one column `cell` names what a cell changes, and with `wide` the varying columns
    follow at the end. Which columns vary is decided on the rows given: to show some cells of a
    sweep, present the whole table first and select rows afterwards.
    """
    cells = checked_cells(cells, *SHOWN)
    named = varying(cells) or [c for c in ("model", "precision", "sharding") if c in cells]
    ordered = ranked(cells.assign(_name=cell_names(cells)))
    choices = {c: [formatting.plain(v) for v in ordered[c]] for c in named}
    measured = {
        h: column(ordered) for h, column in shown_columns(ordered).items() if wide or h != FAMILY
    }
    names = {"cell": [formatting.plain(v) for v in ordered["_name"]]}
    many = len(named) > MANY
    columns = names | measured | (choices if wide else {}) if many else choices | measured
    text = DataFrame(columns, index=ordered.index, dtype=str)
    text.attrs = cells.attrs
    return text.loc[:, [c for c in text if c in _ALWAYS or (text[c] != "").any()]]


def ranked(cells: DataFrame) -> DataFrame:
    """Return the cells with the largest speedup first, then throughput; the unmeasured last.

    A measured cell without a throughput comes after those that have one.
    """
    table = checked_cells(cells)
    keys = [c for c in ("speedup", "images_per_second") if c in table]
    order = table.assign(_last=table["status"] != Status.measured)
    ascending = [True] + [False] * len(keys)
    return order.sort_values(["_last", *keys], ascending=ascending, kind="stable").drop(
        columns="_last"
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


def peaks_gib(cells: DataFrame) -> Series:
    """Return the peak memory of the worst rank in GiB: allocated on a GPU, resident on CPU."""
    peaks = [
        pd.to_numeric(cells[c], errors="coerce").astype(float)
        for c in ("peak_allocated_gib", "peak_rss_gib")
        if c in cells
    ]
    nothing = Series(np.nan, cells.index, dtype=float)
    return peaks[0].fillna(peaks[1]) if len(peaks) > 1 else peaks[0] if peaks else nothing


def _texts(column: str, text: Callable[[Any], str]) -> Column:
    return lambda table: [text(value) for value in table[column]]


def _with_spread(column: str, text: Callable[[Any], str]) -> Column:
    """Return the texts of a column, with the standard deviation over repetitions where there is one."""
    spread = f"{column}_sd"

    def texts(table: DataFrame) -> list[str]:
        means = [text(value) for value in table[column]]
        if spread not in table:
            return means
        ends = ["" if formatting.missing(v) else f" ± {text(v)}" for v in table[spread]]
        return [
            f"{mean.removesuffix(' %') if end.endswith(' %') else mean}{end}" if mean else ""
            for mean, end in zip(means, ends, strict=True)
        ]

    return texts


def _replicates(table: DataFrame) -> list[str]:
    """Return how many repetitions of a setting were measured, `2 of 3`."""
    if "replicates" not in table:
        return [""] * len(table)
    counts = zip(table["replicates"], table["replicates_asked"], strict=True)
    return [f"{n}" if n == asked else f"{n} of {asked}" for n, asked in counts]


def _speedups(table: DataFrame) -> list[str]:
    columns = (table[c] for c in ("speedup", "speedup_low", "speedup_high"))
    return [formatting.ratio(*row) for row in zip(*columns, strict=True)]


def _claims(table: DataFrame) -> list[str]:
    rows = zip(table["claim"], table["speedup_note"], strict=True)
    return [next((str(v) for v in row if not formatting.missing(v)), "") for row in rows]


def _families(table: DataFrame) -> list[str]:
    """Return the interval that belongs to the claim, where it is one of several cells."""
    columns = (table[c] for c in ("claim_low", "claim_high", "family_size"))
    return [
        ""
        if formatting.missing(low) or formatting.missing(size) or size < 2
        else f"[{low:.2f}, {high:.2f}] of {size:.0f}"
        for low, high, size in zip(*columns, strict=True)
    ]


def _statuses(table: DataFrame) -> list[str]:
    flags = [flag for flag in FLAGS if flag in table]
    some = table[["status", "reason", *flags]].to_dict("records")
    return [formatting.status(row) for row in some]


def _optional(column: str) -> Column:
    """Return the texts of a column that only some tables have."""
    return lambda table: [
        formatting.plain(v) for v in table.get(column, Series("", table.index, dtype=object))
    ]


def _differences(table: DataFrame) -> list[str]:
    """Return differences of accuracy in points, with the interval that the claim is about."""
    columns = [f"accuracy_difference{end}" for end in ("", "_low", "_high")]
    if not set(columns) <= set(table):
        return [""] * len(table)
    return [
        ""
        if formatting.missing(mean)
        else f"{100 * mean:+.2f}"
        if formatting.missing(low)
        else f"{100 * mean:+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]"
        for mean, low, high in zip(*(table[c] for c in columns), strict=True)
    ]


def _times_to_target(table: DataFrame) -> list[str]:
    """Return seconds to the target accuracy, or `not reached`; and of how many repetitions that is."""
    if "seconds_to_target" not in table or "task.target_accuracy" not in table:
        return [""] * len(table)
    return [_time_to_target(row) for row in table.to_dict("records")]


def _time_to_target(row: Mapping[Any, Any]) -> str:
    if formatting.missing(row["task.target_accuracy"]) or row["status"] != Status.measured:
        return ""
    if formatting.missing(row["seconds_to_target"]):
        return "not reached"
    seconds = formatting.number(row["seconds_to_target"])
    reached, all_ = row.get("reached_target"), row.get("replicates")
    if formatting.missing(reached) or reached == all_:
        return seconds
    return f"{seconds} ({reached:.0f} of {all_:.0f})"


MEASURED: dict[str, Column] = {
    heading("images_per_second"): _with_spread("images_per_second", formatting.number),
    heading("speedup"): _speedups,
    "claim": _claims,
    "status": _statuses,
    FAMILY: _families,
    heading("step_time_ms"): _texts("step_time_ms", formatting.number),
    heading("peak_gib"): lambda table: [formatting.number(v) for v in peaks_gib(table)],
    heading("accuracy_top1"): _with_spread("accuracy_top1", formatting.percent),
    DIFFERENCE: _differences,
    ACCURACY: _optional("accuracy_claim"),
    heading("seconds_to_target"): _times_to_target,
    heading("blocks"): _texts("blocks", formatting.whole),
    heading("replicates"): _replicates,
}


def shown_columns(table: DataFrame) -> dict[str, Column]:
    """Return `MEASURED`, and the user's own columns that the table has."""
    own = [m for m in own_metrics(table).values() if m.column in table]
    return MEASURED | {m.axis_label: _texts(m.column, formatting.number) for m in own}


SHOWN = ("images_per_second", "speedup", "speedup_low", "speedup_high", "claim", "speedup_note",
         "step_time_ms", "accuracy_top1", "blocks", "reason", "claim_low", "claim_high",
         "family_size")  # fmt: skip
_ALWAYS = ("cell", heading("images_per_second"), heading("speedup"), "status")


def coverage(cells: DataFrame) -> DataFrame:
    """Return one row per cell without a measurement: what varies, status, reason, rank, cell id.

    A cell of the sweep that was never run has the status `not run`.
    """
    cells = checked_cells(cells, "reason", "failed_rank", "attempt")
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
    status = checked_cells(cells)["status"].map(
        lambda s: "not run" if formatting.missing(s) else str(s)
    )
    tally = status.value_counts().rename_axis("status").rename("num_cells").reset_index()
    return tally.sort_values("status", key=lambda s: s != Status.measured, kind="stable")
