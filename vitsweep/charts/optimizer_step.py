"""The optimizer step by implementation."""

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Bars, Chart, labels
from vitsweep.results.record import Status
from vitsweep.tables.formatting import missing, number, percent, ratio
from vitsweep.tables.names import name_parts, varying_columns, with_changes
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells
from vitsweep.tables.valid_runs import text as text_of


def optimizer_steps(cells: DataFrame) -> DataFrame:
    """Return optimizer-step time by optimizer and implementation, beside the whole step.

    `optimizer` is split into family and implementation (`adamw_foreach`: adamw, foreach).
    `step_ratio` is the loop implementation's optimizer time / this one's with everything else the
    same, empty where the loop was not measured; `speedup` is end to end over the cell's baseline.
    """
    cells = checked_cells(cells, "optimizer", "optimizer_ms", "step_time_ms")
    measured = cells[(cells["status"] == Status.measured) & cells["optimizer_ms"].notna()]
    names = [str(name).partition("_") for name in measured["optimizer"]]
    others = [c for c in varying_columns(cells) if c != "optimizer"]
    table = measured.assign(
        family=Series([n[0] for n in names], measured.index, dtype=object),
        implementation=Series([n[2] for n in names], measured.index, dtype=object),
    )
    machine = ["_sweep", "_device"]
    table = table.assign(**{f"_{c}": text_of(table, c) for c in ("sweep", "device")})
    keys = [*others, "family", *machine]
    loops = (
        table[table["implementation"] == "loop"]
        .groupby(keys, observed=True, dropna=False, sort=False)["optimizer_ms"]
        .first()
        .rename("loop_ms")
    )
    kept = ["cell_id", *others, "family", "implementation", "optimizer_ms", "step_time_ms"]
    compared = ["speedup", "speedup_low", "speedup_high", "claim", "baseline_cell_id"]
    shown = [c for c in (*compared, "throughput_spread", "blocks") if c in table]
    return (
        table.join(loops, on=keys)[[*kept, *shown, "loop_ms"]]
        .assign(
            step_ratio=lambda t: t["loop_ms"] / t["optimizer_ms"],
            share_of_step=lambda t: t["optimizer_ms"] / t["step_time_ms"],
        )
        .sort_values([*others, "family", "optimizer_ms"])
    )


def table_of(tables: SweepTables) -> DataFrame:
    """Return optimizer steps of cells that change nothing else, where there are two or more."""
    changed = with_changes(tables.settings)
    if "optimizer_ms" not in changed or changed.empty:
        return NOTHING
    alone = changed[[all(c.startswith("optimizer=") for c in s) for s in changed["changes"]]]
    if alone["optimizer_ms"].notna().sum() < 2:
        return NOTHING
    match = dict(zip(alone["cell_id"], name_parts(alone)["match"], strict=True))
    table = optimizer_steps(alone)
    table = table.assign(match=table["cell_id"].map(match))
    return table if len(table) > 1 and table["implementation"].nunique() > 1 else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `optimizer_steps`: milliseconds, gain over the loop, share of step."""
    rest = labels(table.drop(columns="optimizer", errors="ignore"))
    rest = table["match"] if "match" in table else rest
    rest = Series(style.apart(rest.tolist()), table.index)
    shown = table.assign(
        optimizer=table["family"] + "_" + table["implementation"], rest=rest
    ).sort_values(["rest", "family", "optimizer_ms"])
    names = [
        " · ".join(filter(None, row)) for row in zip(shown["optimizer"], shown["rest"], strict=True)
    ]
    bars = Bars(column="optimizer_ms", group="optimizer", grey=False, note=_note)
    return bars.draw(shown, names)


def _note(row: Series) -> str:
    text = f"{number(row['optimizer_ms'])} ms, {percent(row['share_of_step'])} of the step"
    is_compared = row["implementation"] != "loop" and not missing(row["step_ratio"])
    return f"{text}, {ratio(row['step_ratio'])} the loop's speed" if is_compared else text


CHART = Chart("The optimizer step", table_of, draw)
