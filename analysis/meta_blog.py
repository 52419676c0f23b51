"""Meta AI, "Significantly faster Vision Transformer training" (2022-05-05), beside a sweep.

The blog prints seven figures; its per-technique waterfall, its points at 8, 16 and 32 GPUs, its model
and whether 560 is per GPU or in total were never found, so those cells stay empty.

    python -m analysis.meta_blog results/meta_speedups
"""

import pandas as pd
from pandas import DataFrame, Series

from analysis.study import main, with_conditions
from vitsweep.charts.optimizer_step import optimizer_steps
from vitsweep.charts.per_chip import per_chip
from vitsweep.tables.cost import epoch_hours
from vitsweep.tables.effects import waterfall
from vitsweep.tables.names import with_changes
from vitsweep.tables.published import beside, published
from vitsweep.tables.scaling import scaling_efficiency
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import KEY, row_keys

BLOG = "Meta AI blog"
FIGURE = ["value", "unit", "conditions", "sure", "source"]
SETTINGS = {
    "batch560": "batch == 'blog_560' and precision != 'O3'",
    "batch384_im256": "batch == 'blog_384_256px' and precision != 'O3'",
    "full_fp16": "precision == 'O3'",
}
"""Published experiment -> the cells that may be it, together with all the other techniques."""
OPTIMIZED = "optimized"
TECHNIQUES = {"precision", "sharding", "optimizer", "classifier"}
"""Groups of which the optimized set-up of the blog changes every one."""
OPTIMIZER = "family implementation optimizer_ms step_ratio step_time_ms speedup claim".split()


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
        .reindex(columns=[*columns, "claim", "gain", "gain_claim", "model_tflops_per_rank"])
        .assign(published_speedup=None)
    )


def settings(sweep: SweepTables) -> DataFrame:
    """The three settings with a published speedup; of several fitting cells the fullest one."""
    changed = with_changes(sweep.cells).pipe(with_conditions)
    rows = [_fullest(changed, which).assign(experiment=name) for name, which in SETTINGS.items()]
    columns = [
        "experiment",
        "cell_id",
        "images_per_second",
        "speedup",
        "speedup_low",
        "speedup_high",
    ]
    measured = pd.concat(rows).reindex(columns=[*columns, "claim", "conditions"])
    return beside(measured, _figures("speedup$"), on=["experiment"])


def epochs(sweep: SweepTables) -> DataFrame:
    """Hours per ImageNet-1k epoch of the baseline and of the cell with the most techniques."""
    hours = epoch_hours(sweep.cells)
    optimized = _fullest(with_changes(sweep.cells), "speedup.notna() and claim != 'baseline'")
    keys = row_keys(hours)
    compared = hours[keys.isin(row_keys(optimized))]
    wanted = compared if len(compared) else hours
    baseline = hours[keys.isin(row_keys(wanted, "baseline_cell_id"))].head(1)
    texts = with_conditions(sweep.cells)["conditions"]
    measured = pd.concat(
        [baseline.assign(system="ddp-baseline"), compared.assign(system="pycls-vit-optimized")]
    ).join(texts)
    figures = _figures("epoch_time", ["system", *FIGURE])
    columns = [
        "system",
        "cell_id",
        "epoch_hours",
        "epoch_hours_low",
        "epoch_hours_high",
        "conditions",
    ]
    return beside(measured[columns], figures, on=["system"])


def gpu_scaling(sweep: SweepTables) -> DataFrame:
    """Throughput by number of GPUs, and the speedup over DDP at the same number.

    Published at 64 GPUs with all techniques: it stands beside no DDP baseline and no cell that has
    only some of them.
    """
    devices = sweep.runs.groupby(sweep.runs["device"].astype(str), sort=False)
    curves = [scaling_efficiency(some, sweep.baselines) for _, some in devices]
    curve = pd.concat(curves, ignore_index=True).pipe(with_conditions)
    curve = curve.assign(
        experiment=_optimized(curve, sweep.cells).map({True: OPTIMIZED, False: ""})
    )
    columns = [
        "experiment",
        "curve",
        "world_size",
        "images_per_second",
        "images_per_second_per_rank",
        "efficiency",
        "efficiency_note",
    ]
    measured = curve.reindex(columns=[*columns, "oversubscribed", "speedup", "conditions"])
    figures = _figures("speedup_vs_ddp").assign(world_size=64, experiment=OPTIMIZED)
    return beside(measured.astype({"world_size": int}), figures, on=["world_size", "experiment"])


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
    return beside(
        measured[[*columns, "reference"]], _figures("relative_throughput"), on=["experiment"]
    )


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
    return beside(optimizer_steps(alone)[OPTIMIZER], figures, on=["family", "implementation"])


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


def _fullest(changed: DataFrame, which: str) -> DataFrame:
    fitting = changed.query(which)
    size = fitting["changes"].map(len)
    return (
        fitting.assign(_size=size).sort_values(["_size", "speedup"]).tail(1).drop(columns="_size")
    )


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
