"""Profiler traces of runs: their paths, and the operations of one traced step."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.files import read_bytes
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import as_text
from vitsweep.tables.load import ordered
from vitsweep.tables.names import varying

OPTIMIZER_STEP = "Optimizer.step#"
"""Prefix of torch's annotation of an optimizer step in a trace."""

HOST, DEVICE = "host", "device"
_OPERATIONS = {"cpu_op": HOST, "kernel": DEVICE, "gpu_memcpy": DEVICE, "gpu_memset": DEVICE}
_MARKS = {"user_annotation": HOST, "gpu_user_annotation": DEVICE}


def traces_of(store: Store) -> dict[str, Path]:
    """Return cell -> its latest trace, for cells that were run with `measurement.trace=true`."""
    found = store.cells.glob("*/attempts/*/trace.json.gz")
    newest_last = sorted(found, key=lambda path: path.stat().st_mtime)
    return {path.parents[2].name: path for path in newest_last}


def spans(trace: Path) -> DataFrame:
    """Return the outermost operations of a traced step: `lane, start_ms, ms, in_optimizer`.

    `lane` is `host` (operations as Python called them) or `device` (kernels and copies); time runs
    from the first operation. Operations within the annotation of `Optimizer.step` are `in_optimizer`.

    Args:
        trace: a Chrome trace as torch.profiler writes it.
    """
    document = json.loads(gzip.decompress(read_bytes(trace)))
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    rows = [
        (_OPERATIONS[e["cat"]], str(e["tid"]), float(e["ts"]), float(e["dur"]))
        for e in events
        if e.get("cat") in _OPERATIONS
    ]
    table = DataFrame(rows, columns=["lane", "thread", "start", "long"])
    outermost = _outermost(table)
    begin = outermost["start"].min()
    return DataFrame(
        {
            "lane": outermost["lane"],
            "start_ms": (outermost["start"] - begin) / 1e3,
            "ms": outermost["long"] / 1e3,
            "in_optimizer": _within(outermost, _optimizer_steps(events)),
        }
    ).reset_index(drop=True)


def optimizer_traces(cells: DataFrame, traces: Mapping[str, Path]) -> DataFrame:
    """Return `spans` of every implementation of one optimizer on one model, the loop first.

    Where several were traced, SGD on a model without tokens (a ResNet, as in Meta's blog) is chosen
    first, then SGD, then any optimizer traced in at least two implementations. Empty if none was.
    """
    known = cells[(cells["status"] == Status.measured) & cells["cell_id"].isin(set(traces))]
    if known.empty:
        return DataFrame()
    names = known["optimizer"].astype(str).str.partition("_")
    others = [c for c in varying(known) if c != "optimizer"]
    rest = as_text(known[others]).agg(" · ".join, axis=1) if others else ""
    table = known.assign(family=names[0], implementation=names[2], rest=rest)
    several = table.groupby(["rest", "family"])["implementation"].transform("nunique") > 1
    order = table.assign(
        _not_sgd=table["family"] != "sgd", _tokens=table["num_tokens"].notna(), _first=~several
    ).sort_values(["_first", "_tokens", "_not_sgd"], kind="stable")
    first = order.iloc[0]
    chosen = table[several & table["family"].eq(first["family"]) & table["rest"].eq(first["rest"])]
    parts = [
        spans(traces[row["cell_id"]]).assign(
            **{c: row[c] for c in ("cell_id", "model", "family", "implementation", "optimizer_ms")}
        )
        for _, row in ordered(chosen).sort_values("optimizer", kind="stable").iterrows()
    ]
    return pd.concat(parts, ignore_index=True) if parts else DataFrame()


def _outermost(table: DataFrame) -> DataFrame:
    """Leave out operations that ran inside another operation of the same thread."""
    ordered = table.sort_values(["lane", "thread", "start", "long"], ascending=[True] * 3 + [False])
    end = ordered["start"] + ordered["long"]
    before = end.groupby([ordered["lane"], ordered["thread"]]).transform(
        lambda ends: ends.cummax().shift(fill_value=float("-inf"))
    )
    return ordered[ordered["start"] >= before].sort_values("start")


def _optimizer_steps(events: list[Any]) -> list[tuple[str, float, float]]:
    return [
        (_MARKS[e["cat"]], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") in _MARKS and str(e["name"]).startswith(OPTIMIZER_STEP)
    ]


def _within(table: DataFrame, marks: list[tuple[str, float, float]]) -> Series:
    inside = Series(False, table.index)
    for lane, begin, end in marks:
        inside |= (table["lane"] == lane) & table["start"].between(begin, end)
    return inside
