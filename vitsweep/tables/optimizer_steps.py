"""The time of the optimizer step by implementation, and the speedup of the whole step."""

from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.names import varying
from vitsweep.tables.valid_runs import checked_cells, text


def optimizer_steps(cells: DataFrame) -> DataFrame:
    """Return optimizer-step time by optimizer and implementation, beside the whole step.

    `optimizer` is split into family and implementation (`adamw_foreach`: adamw, foreach).
    `step_ratio` is the loop implementation's optimizer time / this one's with everything else the
    same, empty where the loop was not measured; `speedup` is end to end over the cell's baseline.
    """
    cells = checked_cells(cells, "optimizer", "optimizer_ms", "step_time_ms")
    measured = cells[(cells["status"] == Status.measured) & cells["optimizer_ms"].notna()]
    names = [str(name).partition("_") for name in measured["optimizer"]]
    others = [c for c in varying(cells) if c != "optimizer"]
    table = measured.assign(
        family=Series([n[0] for n in names], measured.index, dtype=object),
        implementation=Series([n[2] for n in names], measured.index, dtype=object),
    )
    machine = ["_sweep", "_device"]
    table = table.assign(**{f"_{c}": text(table, c) for c in ("sweep", "device")})
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
