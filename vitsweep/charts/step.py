"""What a step takes: time by phase, the optimizer's part, bytes sent, memory."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.bars import Bars, apart
from vitsweep.charts.style import NOTHING, Chart, labels
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables.formatting import cell_label, missing, number, percent, plain, ratio
from vitsweep.tables.names import (
    cell_names,
    in_menu_order,
    name_parts,
    varying_columns,
    with_changes,
)
from vitsweep.tables.scaling import PURPOSES, communication
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells

MOST = 30
"""Bars of one chart."""

# Where the time of a step goes.

PHASE_COLUMNS = ("data_ms", "forward_ms", "backward_ms", "bubble_ms", "optimizer_ms")


def draw_phases(cells: DataFrame) -> Figure:
    """Stack the phases of each measured cell, the shortest step on top.

    Phases come from instrumented steps of their own; the diamond is the timed step without
    instruments, which is shorter where phases overlap.
    """
    phases = [p for p in PHASE_COLUMNS if p in cells and cells[p].notna().any()]
    shown = cells.dropna(subset=phases, how="all").sort_values("step_time_ms").head(MOST)
    bars = Bars(
        column="phases_ms", label=style.axis_label("step_time_ms"),
        parts={p: (style.PHASES[p], METRICS[p].label) for p in phases},
        mark="step_time_ms", marked="Timed step", note=lambda row: number(row["step_time_ms"]),
    )  # fmt: skip
    table = shown.assign(phases_ms=shown[phases].sum(axis=1))
    return bars.draw(table, cell_names(cells)[shown.index].tolist())


PHASES = Chart("phases", "Where the step's time goes", draw_phases, needs=("forward_ms",))

# The optimizer step by implementation.


def optimizer_steps(cells: DataFrame) -> DataFrame:
    """Return the measured cells with the time of their optimizer step, next to the whole step.

    `optimizer` is split into `family` and `implementation` (`adamw_foreach`: adamw, foreach).
    `step_ratio` is the loop implementation's optimizer time / this one's with everything else the
    same, empty where the loop was not measured.
    """
    cells = checked_cells(cells, "optimizer", "optimizer_ms", "step_time_ms", "sweep", "device")
    measured = cells[(cells["status"] == Status.measured) & cells["optimizer_ms"].notna()]
    names = [str(name).partition("_") for name in measured["optimizer"]]
    table = measured.assign(family=[n[0] for n in names], implementation=[n[2] for n in names])
    others = [c for c in varying_columns(cells) if c != "optimizer"]
    same = [*others, "family", "sweep", "device"]
    loops = table[table["implementation"] == "loop"].drop_duplicates(same)
    loops = loops[[*same, "optimizer_ms"]].rename(columns={"optimizer_ms": "loop_ms"})
    return (
        table.merge(loops, on=same, how="left")
        .assign(
            step_ratio=lambda t: t["loop_ms"] / t["optimizer_ms"],
            share_of_step=lambda t: t["optimizer_ms"] / t["step_time_ms"],
        )
        .sort_values([*others, "family", "optimizer_ms"])
    )


def optimizers_alone(tables: SweepTables) -> DataFrame:
    """Return optimizer steps of cells that change nothing else, where there are two or more."""
    changed = with_changes(tables.settings)
    alone = changed.loc[[all(c.startswith("optimizer=") for c in s) for s in changed["changes"]]]
    if alone["optimizer_ms"].notna().sum() < 2:
        return NOTHING
    table = optimizer_steps(alone.assign(match=name_parts(alone)["match"]))
    return table if table["implementation"].nunique() > 1 else NOTHING


def draw_optimizers(table: DataFrame) -> Figure:
    """Draw the table of `optimizer_steps`: milliseconds, gain over the loop, share of step."""
    rest = Series(apart(table["match"].tolist()), table.index)
    shown = table.assign(rest=rest).sort_values(["rest", "family", "optimizer_ms"])
    parts = zip(shown["optimizer"].map(plain), shown["rest"], strict=True)
    bars = Bars(
        column="optimizer_ms", note=_of_optimizer,
        colour=lambda row: style.colour("optimizer", plain(row["optimizer"])),
    )  # fmt: skip
    return bars.draw(shown, [" · ".join(filter(None, row)) for row in parts])


def _of_optimizer(row: Series) -> str:
    text = f"{number(row['optimizer_ms'])} ms, {percent(row['share_of_step'])} of the step"
    is_compared = row["implementation"] != "loop" and not missing(row["step_ratio"])
    return f"{text}, {ratio(row['step_ratio'])} the loop's speed" if is_compared else text


OPTIMIZER_STEP = Chart(
    "optimizer_step", "The optimizer step", draw_optimizers, table=optimizers_alone,
    needs=("optimizer_ms",), least=2, varies=("optimizer",),
)  # fmt: skip

# Bytes sent per rank and step: counted by purpose, and what the formula says.

MIB = 2.0**20
COLOURS = dict(zip(PURPOSES, ("#4477aa", "#88ccee", "#117733", "#aa4499", "#bbbbbb"), strict=True))


def sent(tables: SweepTables) -> DataFrame:
    """Return the bytes sent, where anything was sent."""
    table = communication(tables.settings)
    return table[table["bytes_per_step"] > 0]


def draw_sent(table: DataFrame) -> Figure:
    """Draw the table of `tables.scaling.communication`: stacked counts, a diamond at the formula's total."""
    purposes = [p for p in PURPOSES if p in table]
    formulas = table[[c for c in table if str(c).startswith("predicted_")]]
    total = formulas.sum(axis=1, min_count=max(len(formulas.columns), 1))
    mib = table[purposes] / MIB
    degrees = [str(c) for c in table if str(c).startswith("mesh.")]
    sizes = [c for c in ("world_size", "num_tokens", *degrees) if table[c].nunique() > 1]
    of_size = [cell_label(row, sizes) for _, row in table.iterrows()]
    names = [" · ".join(filter(None, row)) for row in zip(labels(table), of_size, strict=True)]
    shown = table.assign(**mib, mib=mib.sum(axis=1), formula=total / MIB, name=names)
    shown = shown.sort_values("bytes_per_step", ascending=False).head(MOST)
    bars = Bars(
        column="mib", label="Sent per rank and step (MiB)", mark="formula", marked="formula",
        parts={p: (COLOURS[p], p.partition("_")[0]) for p in purposes},
        note=lambda row: f"{number(row['mib'])} MiB",
    )  # fmt: skip
    return bars.draw(shown, shown["name"].tolist())


COMMUNICATION = Chart("communication", "Communication", draw_sent, table=sent)

# Peak memory of the worst rank, by sharding.


def draw_memory(cells: DataFrame) -> Figure:
    """Draw one bar per cell in groups of one sharding; a cell that ran out of memory says so."""
    wanted = (Status.measured, Status.out_of_memory)
    table = cells[cells["status"].isin(wanted)]
    sharding = table["sharding"].map(plain)
    known = pd.Categorical(sharding, in_menu_order("sharding", sharding), ordered=True)
    table = table.assign(series=cell_names(table), _place=known.codes)
    shown = table.sort_values(["_place", "peak_gib"], ascending=[True, False]).head(MOST)
    ended = np.where(shown["status"] == Status.out_of_memory, " out of memory", "")
    bars = Bars(
        column="peak_gib", group="sharding", grey=False, note=lambda row: row["note"],
        sure=lambda row: plain(row["status"]) != Status.out_of_memory,
    )  # fmt: skip
    notes = (shown["peak_gib"].map(number) + ended).str.strip()
    return bars.draw(shown.assign(note=notes), shown["series"].tolist())


MEMORY = Chart("memory", "Peak memory", draw_memory, needs=("peak_gib",), least=2)
