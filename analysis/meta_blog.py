"""Meta AI, "Significantly faster Vision Transformer training" (2022-05-05), beside a sweep.

The blog prints seven figures; its per-technique waterfall, its points at 8, 16 and 32 GPUs, its model
and whether 560 is per GPU or in total were never found, so those cells stay empty.

    python -m analysis.meta_blog results/meta_speedups
"""

import pandas as pd
import yaml
from pandas import DataFrame, Series

from analysis.study import beside, main, with_conditions, without_interval
from vitsweep.charts.step import optimizer_steps
from vitsweep.extras.published.figures import Entry, beside_cells, published
from vitsweep.results.record import Status
from vitsweep.spec.menu import conf_dir
from vitsweep.tables.effects import waterfall
from vitsweep.tables.names import with_changes
from vitsweep.tables.scaling import cores_per_rank, scaling_efficiency
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import KEY, checked_cells

BLOG = "Meta AI blog"
FIGURE = ["value", "unit", "conditions", "sure", "source"]
OPTIMIZED = "optimized"
GAIN = "gain gain_low gain_high gain_claim".split()
TECHNIQUES = {"precision", "sharding", "optimizer", "classifier"}
"""Groups of which the optimized set-up of the blog changes every one."""
OPTIMIZER = (
    "family implementation optimizer_ms step_ratio step_time_ms speedup speedup_low speedup_high claim"
).split()


def entries_of(sweep: str) -> list[Entry]:
    """Return what a named sweep of conf/ lists under `published`."""
    text = (conf_dir() / "sweep" / f"{sweep}.yaml").read_text(encoding="utf-8")
    found: list[Entry] = yaml.safe_load(text)["published"]
    return found


def cumulative(sweep: SweepTables) -> DataFrame:
    """Each technique on top of those before it; nothing of this was published."""
    steps = waterfall(sweep.runs, sweep.baselines)
    measured = sweep.cells[[*KEY, "model_tflops_per_rank"]]
    columns = [
        "kind",
        "added",
        "status",
        "images_per_second",
        "speedup",
        "speedup_low",
        "speedup_high",
    ]
    return (
        steps.astype(dict.fromkeys(KEY, object))
        .merge(measured.astype(dict.fromkeys(KEY, object)), on=list(KEY))
        .reindex(columns=[*columns, "claim", *GAIN, "model_tflops_per_rank"])
        .assign(published_speedup=None)
    )


def settings(sweep: SweepTables) -> DataFrame:
    """The three settings with a published speedup, beside the cells that `+sweep=meta_speedups` names."""
    return _beside(sweep, "meta_speedups")


def epochs(sweep: SweepTables) -> DataFrame:
    """Hours per ImageNet-1k epoch of the baseline and of all techniques, as `+sweep=meta_epoch_time`."""
    return _beside(sweep, "meta_epoch_time")


def _beside(sweep: SweepTables, named: str) -> DataFrame:
    table = beside_cells(sweep.cells, entries_of(named))
    here = with_conditions(sweep.cells).drop_duplicates("cell_id").set_index("cell_id")
    lists = {c: table[c].map("; ".join) for c in ("differs", "unknown")}
    measured = ["cell_id", "measured", "measured_low", "measured_high", "note", "here"]
    return table.assign(here=table["cell_id"].map(here["conditions"]), **lists)[
        ["experiment", "system", *FIGURE, *measured, *lists]
    ]


def gpu_scaling(sweep: SweepTables) -> DataFrame:
    """Throughput by number of GPUs, and the speedup over DDP at the same number.

    Published at 64 GPUs with all techniques: it stands beside no DDP baseline and no cell that has
    only some of them.
    """
    devices = sweep.runs.groupby(sweep.runs["device"].astype(str), sort=False)
    curves = [scaling_efficiency(some, sweep.baselines) for _, some in devices]
    curve = pd.concat(curves, ignore_index=True).pipe(with_conditions)
    matching = beside_cells(sweep.cells, entries_of("meta_gpu_scaling"))["cell_id"]
    curve = curve.assign(
        experiment=curve["cell_id"].isin(matching).map({True: OPTIMIZED, False: ""})
    )
    columns = [
        "experiment",
        "curve",
        "world_size",
        "images_per_second",
        "images_per_second_per_rank",
        *"efficiency efficiency_low efficiency_high efficiency_note oversubscribed".split(),
        *"speedup speedup_low speedup_high conditions".split(),
    ]
    measured = curve.reindex(columns=columns)
    figures = _figures("speedup_vs_ddp").assign(world_size=64, experiment=OPTIMIZED)
    return beside(measured.astype({"world_size": int}), figures, on=["world_size", "experiment"])


def per_chip(cells: DataFrame) -> DataFrame:
    """Return throughput per rank relative to the baseline of the slowest device, slowest device first.

    Empty where no cell was measured. Throughput per rank is that of one accelerator. Different devices
    never share a block, so the ratio has no interval; the spread of each row is shown.

    Args:
        cells: one row per cell and device.
    """
    rate = "images_per_second_per_rank"
    columns = "baseline_cell_id", "device", "claim", "images_per_step", "world_size"
    cells = checked_cells(cells, rate, *columns)
    measured = cells[cells["status"] == Status.measured].dropna(subset=[rate])
    if measured.empty:
        return measured
    baselines = measured[measured["cell_id"] == measured["baseline_cell_id"]]
    reference = (baselines if len(baselines) else measured).nsmallest(1, rate).iloc[0]
    table = measured.assign(
        cores_per_rank=cores_per_rank(measured),
        images_per_rank=measured["images_per_step"] / measured["world_size"],
        relative_throughput=measured[rate] / reference[rate],
        reference=f"{reference['device']}, {reference['cell_id']}",
    )
    slowest = measured[rate].groupby(measured["device"].astype(str)).transform("min")
    return table.assign(_slowest=slowest).sort_values(["_slowest", rate]).drop(columns="_slowest")


def chips(sweep: SweepTables) -> DataFrame:
    """Throughput per chip; the published ratio is an optimized A100 over a baseline V100.

    It stands beside such a row only, else in a row of its own.
    """
    table = per_chip(sweep.cells)
    fits = (
        _optimized(table, sweep.cells)
        & table["device"].astype(str).str.contains("A100")
        & table["reference"].astype(str).str.contains("V100")
    )
    measured = table.assign(experiment=fits.map({True: "per_chip_throughput", False: ""}))
    columns = [
        "experiment",
        "device",
        "cell_id",
        "images_per_second_per_rank",
        "relative_throughput",
    ]
    named = measured[[*columns, "reference"]].rename(columns=without_interval)
    return beside(named, _figures("relative_throughput"), on=["experiment"])


def optimizer_step(sweep: SweepTables) -> DataFrame:
    """The optimizer step of cells that change nothing else; published loop and foreach times."""
    figures = (
        published("pytorch PR", "optimizer_step")
        .assign(family=lambda t: t["system"].str.extract(r"/(\w+)")[0].str.lower())
        .pivot_table(
            index=["family", "system", "source", "conditions", "sure"],
            columns="metric",
            values="number",
        )
        .reset_index()
        .assign(implementation="foreach", step_ratio=lambda t: t["time_loop"] / t["time_foreach"])
    )
    changed = with_changes(sweep.cells)
    alone = changed[[all(c.startswith("optimizer") for c in s) for s in changed["changes"]]]
    found = beside(optimizer_steps(alone)[OPTIMIZER], figures, on=["family", "implementation"])
    return found.rename(columns=without_interval)


def accuracy(sweep: SweepTables) -> DataFrame:
    """Top-1 of every trained cell; the blog prints an upper bound for what full fp16 loses."""
    trained = sweep.cells.reindex(columns=["cell_id", "precision", "accuracy_top1"]).dropna()
    is_full = trained["precision"].astype(str) == "O3"
    measured = trained.assign(experiment=is_full.map({True: "full_fp16", False: ""}))
    return beside(measured, _figures("accuracy_drop"), on=["experiment"])


def _figures(metric: str, columns: list[str] | None = None) -> DataFrame:
    return published(BLOG, metric=metric)[columns or ["experiment", *FIGURE]]


def _optimized(table: DataFrame, cells: DataFrame) -> "Series[bool]":
    """Return which rows change all the technique groups of the blog against their baseline."""
    changed = with_changes(cells)
    groups = {
        cell: {c.partition("=")[0] for c in changes}
        for cell, changes in zip(changed["cell_id"], changed["changes"], strict=True)
    }
    fits = [groups.get(cell, set()) >= TECHNIQUES for cell in table["cell_id"]]
    return Series(fits, table.index, dtype=bool)


TABLES = {
    "Techniques alone and cumulative": cumulative,
    "Settings with a published speedup": settings,
    "Hours per epoch": epochs,
    "GPU scaling": gpu_scaling,
    "Per chip": chips,
    "Optimizer step": optimizer_step,
    "Accuracy": accuracy,
}

if __name__ == "__main__":
    main("Meta AI, Significantly faster Vision Transformer training", TABLES)
