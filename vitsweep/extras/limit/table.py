"""The largest value of a setting that still trained, for sweeps that searched for it (`sweep.limit`)."""

from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import heading
from vitsweep.results.record import Status
from vitsweep.tables.formatting import (
    number,
    plain,
    status,
    text_columns,
    value_label,
    values,
    whole,
)
from vitsweep.tables.names import comparable, spec_columns, varying_columns
from vitsweep.tables.sentences import say
from vitsweep.tables.valid_runs import checked_cells

FOLLOWING = ("num_tokens", "resolution_px", "images_per_step", "model.frames", "batch.name")
"""Spec columns that are computed from others, so they do not separate searches."""

AT_THE_LIMIT = ("num_tokens", "num_parameters", "peak_gib", "images_per_second", "cell_id")


def limits(cells: DataFrame, key: str) -> DataFrame:
    """Return one row per combination of all settings but `key`, the largest limit first.

    Columns: the varying settings, `fits` (the largest value of `key` that was measured, 0 if none was),
    `fails_at` (the smallest that ran out of memory, empty if none did), the tokens, parameters,
    peak memory and throughput of the largest cell, and `ended` (why other cells gave no answer).

    Args:
        cells: one row per cell.
        key: spec column as typed, `data.num_frames`.
    """
    cells = checked_cells(cells, *AT_THE_LIMIT, "reason")
    if key not in cells or cells.empty:
        return DataFrame(columns=["fits", "fails_at", *AT_THE_LIMIT, "ended"])
    same = [c for c in spec_columns(cells) if c != key and c not in FOLLOWING]
    names = [c for c in varying_columns(cells) if c in same]
    cells = cells.assign(**{key: _numbers(cells[key], key)})
    group = comparable(cells[same]).agg("|".join, axis=1) if same else Series("", cells.index)
    rows = [_row(some, key, names) for _, some in cells.groupby(group, sort=False)]
    columns = [*names, "fits", "fails_at", *AT_THE_LIMIT, "ended"]
    table = DataFrame(rows, columns=columns).astype({"fits": "Int64", "fails_at": "Int64"})
    return table.sort_values("fits", ascending=False, kind="stable", ignore_index=True)


def _row(cells: DataFrame, key: str, names: list[str]) -> dict[str, Any]:
    kinds, values = cells["status"].astype(str), cells[key]
    measured, failed = (
        values[kinds == kind].dropna() for kind in (Status.measured, Status.out_of_memory)
    )
    others = cells[~kinds.isin([Status.measured, Status.out_of_memory])]
    row = {name: cells[name].iloc[0] for name in names} | {
        "fits": int(measured.max()) if len(measured) else 0,
        "fails_at": int(failed.min()) if len(failed) else None,
        "ended": "; ".join(f"{plain(r[key])} {status(r)}" for _, r in others.iterrows()),
    }
    if len(measured):
        best = cells.iloc[int(values.where(kinds == Status.measured).argmax())]
        row |= {c: best.get(c) for c in AT_THE_LIMIT}
    return row


def _numbers(values: Series, key: str) -> Series:
    try:
        return pd.to_numeric(values)
    except (ValueError, TypeError) as error:
        raise VitsweepError(f"A limit of `{key}` needs numbers in that column: {error}.") from error


def named(table: DataFrame) -> list[str]:
    """Return the columns of the table of limits that name its rows."""
    return [str(c) for c in table if c not in ("fits", "fails_at", "ended", *AT_THE_LIMIT)]


def limit_names(table: DataFrame) -> list[str]:
    """Return a name per row of the table of limits, `fsdp · 2 ranks`."""
    return [
        " · ".join(text for c in named(table) if (text := value_label(c, plain(row[c]))))
        for _, row in table.iterrows()
    ]


def limits_text(table: DataFrame, key: str) -> DataFrame:
    """Return the table of limits as text with printed headings; empty columns are left out."""
    shown = {c: values(c) for c in named(table)} | {
        f"largest {key}": values("fits", lambda fits: plain(fits) if fits else "none"),
        "out of memory at": values("fails_at"),
        "tokens": values("num_tokens", whole),
        "parameters": values("num_parameters", whole),
        heading("peak_gib"): values("peak_gib", number),
        heading("images_per_second"): values("images_per_second", number),
        "ended early": values("ended"),
    }
    return text_columns(table, shown)


def limit_answer(table: DataFrame, key: str) -> str:
    """Return which combination reaches the largest value and which the smallest, in one sentence."""
    found = table[table["fits"] > 0]
    values_ = zip(limit_names(found), found["fits"], strict=True)
    listed = ", ".join(f"{most:,} with {name}".removesuffix(" with ") for name, most in values_)
    return say("limit", key=key, found=listed or "none")
