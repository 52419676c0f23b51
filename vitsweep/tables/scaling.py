"""Strong and weak scaling: throughput and efficiency by number of ranks."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import Status
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.cells import cells
from vitsweep.tables.formatting import (
    Column,
    count,
    missing,
    number,
    percent,
    plain,
    text_columns,
    values,
    with_interval,
)
from vitsweep.tables.names import comparable, series_names, spec_columns, varying_columns
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import Families
from vitsweep.tables.stats import adjusted, any_look_keys, estimate, interval, mean_interval
from vitsweep.tables.valid_runs import checked_cells, checked_runs, keyed, one_device, valid_runs

PURPOSES = tuple(
    f"{purpose}_bytes_per_step"
    for purpose in ("parameter", "gradient", "optimizer", "activation", "unattributed")
)


def communication(cells: DataFrame) -> DataFrame:
    """Return bytes sent per rank and step by purpose, in total and per image, most first.

    Counted values are the mean over ranks. `predicted_...` columns, where the plan made them, are
    each method's exact formula of its own implementation.
    """
    sizes = "sequence_parallel", "world_size", "num_tokens", "images_per_step"
    cells = checked_cells(cells, *sizes, *PURPOSES)
    counted = [p for p in PURPOSES if p in cells and cells[p].notna().any()]
    rare = ("optimizer", "unattributed")
    counted = [p for p in counted if not p.startswith(rare) or cells[p].gt(0).any()]
    formulas = [f"predicted_{p}" for p in PURPOSES if f"predicted_{p}" in cells]
    measured = cells[cells["status"] == Status.measured]
    measured = measured.dropna(subset=counted, how="all") if counted else measured.iloc[:0]
    columns = dict.fromkeys([*varying_columns(cells), *sizes])
    times = "communication_ms step_time_ms blocks baseline_cell_id".split()
    total = measured[counted].apply(pd.to_numeric).sum(axis=1, min_count=1)
    return (
        measured[["cell_id", *columns, *counted, *formulas, *(c for c in times if c in measured)]]
        .assign(
            bytes_per_step=total,
            bytes_per_image=total * measured["world_size"] / measured["images_per_step"],
        )
        .sort_values("bytes_per_step", ascending=False)
    )


SIZES = ("nodes", "ranks_per_node", "world_size", "images_per_step", "batch", "measurement")
SIZE_FIELDS = ("mesh.", "resources.", "batch.images_per_step", "batch.scope", "measurement.blocks")
"""Columns that may differ between the points of one scaling curve."""


def scaling_efficiency(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    cells_: DataFrame | None = None,
    families: Families = (),
) -> DataFrame:
    """Return one row per cell of every scaling curve, smallest world first.

    `scaling` is `strong` (images per step constant) or `weak` (images per rank constant). A curve has the
    same spec otherwise and at least two world sizes; `curve` names it by what distinguishes it. Where
    several meshes have the same world size, the fastest is taken; where several numbers of threads have,
    each has a curve of its own. With n ranks and the smallest world n0, efficiency = throughput(n) / (n /
    n0 x throughput(n0)), which for strong scaling is T(n0) n0 / (n T(n)). The ratio is paired within
    blocks; worlds that never shared one have the bare ratio of their means without an interval, since it
    includes differences between jobs (`efficiency_blocks` is 0 and `efficiency_note` says so). A point
    whose cores per rank or PyTorch are not those of the smallest world has no efficiency, and the
    note names the difference. `speedup` is over the cell's own baseline, at the same number of ranks.

    `efficiency_low` and `efficiency_high` are the 95 % interval of a point by itself. All efficiencies of one
    command are one family: `efficiency_p_holm` tests an efficiency of 1 among them (Holm 1979),
    `efficiency_claim_low` and `efficiency_claim_high` are the interval that belongs to it, and
    `efficiency_family_size` is their number.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
        cells_: one row per cell of these runs, where it is there already.
        families: the cells of each command, oldest first; a cell belongs to the latest command that names
            it. Cells that no command names are one family.

    Raises:
        VitsweepError: the points ran on different devices.
    """
    checked = checked_runs(runs, "device", "world_size", "images_per_step")
    known = keyed(checked, baselines)
    table = cells(checked, baselines) if cells_ is None else cells_
    measured = table[table["status"] == Status.measured].dropna(subset=["world_size"])
    on_one = measured.pipe(one_device).assign(_key=known.numbers)
    with_throughput = on_one.dropna(subset=["images_per_second", "images_per_step"])
    per_block = log_throughput_per_block(known.valid, ROW)
    curves = [_against_smallest(_curves(with_throughput, kind), per_block) for kind in KEPT]
    return _with_family(pd.concat(curves, ignore_index=True), families)


def _with_family(points: DataFrame, families: Families) -> DataFrame:
    """Add what depends on the other efficiencies of a command."""
    p_value = points["efficiency_p_value"].to_numpy(float)
    found = np.full((3, len(points)), np.nan)
    unnamed = {*points["cell_id"]}.difference(*families)
    for family in [unnamed, *families]:
        rows = np.flatnonzero(points["cell_id"].isin(family) & ~np.isnan(p_value))
        found[:2, rows], found[2, rows] = adjusted(p_value[rows]), len(rows)
    p_holm, level, size = found
    sides = {"speedup": "", "speedup_low": "_low", "speedup_high": "_high", "num_blocks": "_blocks"}
    own = DataFrame({name: points[f"efficiency{side}"] for name, side in sides.items()})
    ends = interval(own.assign(any_look=points["any_look"]), Series(level, points.index))
    return points.drop(columns=["efficiency_p_value", "any_look"]).assign(
        efficiency_p_holm=p_holm,
        efficiency_claim_low=ends["low"],
        efficiency_claim_high=ends["high"],
        efficiency_family_size=size,
    )


SMALLEST = "the smallest world"
KEPT = {"strong": "images_per_step", "weak": "images_per_rank"}
"""Kind of scaling -> the column that is constant along a curve."""


def _curves(measured: DataFrame, kind: str) -> DataFrame:
    """Return the points of all curves of one kind, smallest world first."""
    same = [c for c in spec_columns(measured) if c not in SIZES and not c.startswith(SIZE_FIELDS)]
    per_rank = measured["images_per_step"].astype(float) / measured["world_size"]
    keyed = measured.assign(
        images_per_rank=per_rank,
        scaling=kind,
        key=["|".join(row) for row in comparable(measured[same]).itertuples(index=False)],
        cores_per_rank=cores_per_rank(measured),
    )
    curve = ["key", KEPT[kind], "threads"]
    threads = _threads(keyed)
    of_world = threads.groupby([keyed["key"], keyed[KEPT[kind]], keyed["world_size"]])
    varied = (of_world.transform("nunique") > 1).groupby([keyed["key"], keyed[KEPT[kind]]])
    keyed = keyed.assign(threads=threads.where(varied.transform("any"), 0))
    points = (
        keyed.assign(order=keyed.groupby(curve, sort=False).ngroup())
        .sort_values("images_per_second")
        .drop_duplicates([*curve, "world_size"], keep="last")
        .sort_values(["order", "world_size"])
    )
    groups = points.groupby(curve, sort=False)
    several = points.assign(
        reference=groups["_key"].transform("first"),
        reference_world_size=groups["world_size"].transform("first"),
    )[groups["world_size"].transform("nunique") > 1]
    return several.assign(curve=_curve_names(several, kind)).drop(
        columns=["key", "order", "threads"]
    )


def _threads(table: DataFrame) -> Series:
    """Return the threads of each rank on a CPU; 0 on a GPU, where they do not matter, and where unknown."""
    threads = pd.to_numeric(table.get("resources.threads_per_rank", Series(0.0, table.index)))
    is_cpu = table.get("device_type", Series("", table.index)).astype(object) == "cpu"
    return threads.where(is_cpu, 0.0).fillna(0.0)


def cores_per_rank(table: DataFrame) -> Series:
    """Return the cores that each rank had on a CPU; NaN on a GPU and where it is not known."""
    unknown, threads = Series(np.nan, table.index), _threads(table)
    cores = pd.to_numeric(table.get("resources.cores_per_node", unknown))
    ranks = pd.to_numeric(table.get("ranks_per_node", unknown))
    return threads.mask(threads > cores / ranks, cores / ranks).mask(threads == 0)


def _differing(point: Mapping[Hashable, Any], first: Mapping[Hashable, Any]) -> Iterator[str]:
    ranks = count(int(first["world_size"]), "rank")
    here, there = point["cores_per_rank"], first["cores_per_rank"]
    if not (missing(here) or missing(there)) and here != there:
        cores = f"{here:g} {'core' if here == 1 else 'cores'} per rank"
        yield say("point_differs", here=cores, there=f"{there:g}", ranks=ranks)
    elif "True" in (plain(point.get("oversubscribed")), plain(first.get("oversubscribed"))):
        yield FLAGS["oversubscribed"].caption.partition(", ")[0]
    here, there = point.get("torch"), first.get("torch")
    if not (missing(here) or missing(there)) and here != there:
        yield say("point_differs", here=f"PyTorch {here}", there=there, ranks=ranks)


def _curve_names(points: DataFrame, kind: str) -> Series:
    """Return a name per point, shared by its curve: the kind of scaling, and what distinguishes curves."""
    columns = [
        c for c in varying_columns(points) if c not in SIZES and not c.startswith(SIZE_FIELDS)
    ]
    curve = points["order"]
    names = (f"{kind} · " + series_names(points, columns)).groupby(curve).transform("first")
    images = points[KEPT[kind]].map(f", {{:g}} img/{'step' if kind == 'strong' else 'rank'}".format)
    threads = points["threads"].map(", {:g} threads/rank".format)
    for detail in (images, threads, curve.map(" ({})".format)):
        shared = curve.groupby(names).transform("nunique") > 1
        names = names.mask(shared, names + detail)
    return names


def _against_smallest(points: DataFrame, per_block: DataFrame) -> DataFrame:
    references = dict(zip(points["_key"], points["reference"], strict=True))
    growth = (points["world_size"] / points["reference_world_size"]).to_numpy(float)
    ideal = dict(zip(points["_key"], np.log(growth), strict=True))
    ratios = log_ratios(per_block, references, ROW)
    ratios = ratios.assign(log_ratio=lambda t: t["log_ratio"] - [ideal[row] for row in t[ROW]])
    paired = estimate(ratios, ROW).set_index(ROW).to_dict("index")
    mean = per_block.groupby(ROW)["log_throughput"].mean()
    rows = [
        {"speedup": 1.0}
        if cell == first
        else paired.get(cell)
        or {"speedup": np.exp(mean.get(cell, np.nan) - mean.get(first, np.nan) - log_growth)}
        for (cell, first), log_growth in zip(references.items(), ideal.values(), strict=True)
    ]
    columns = ["speedup", "speedup_low", "speedup_high", "num_blocks", "p_value"]
    found = DataFrame(rows, points.index, columns, dtype=float)
    is_first = points["_key"] == points["reference"]
    # what differs from the smallest world besides the ranks
    firsts = points.drop_duplicates("curve").set_index("curve").to_dict("index")
    told = ("; ".join(_differing(p, firsts[p["curve"]])) for p in points.to_dict("records"))
    differences = Series([*told], points.index, dtype=object)
    alike = differences == ""
    unpaired = np.where(found["num_blocks"].isna() & ~is_first, say("unpaired", what=SMALLEST), "")
    return points.assign(
        relative_throughput=found["speedup"] * growth,
        efficiency=found["speedup"].where(alike),
        efficiency_low=found["speedup_low"].where(alike),
        efficiency_high=found["speedup_high"].where(alike),
        efficiency_p_value=found["p_value"].where(alike),
        efficiency_blocks=found["num_blocks"].fillna(0).astype(int),
        efficiency_note=differences.where(~alike, unpaired),
        any_look=points["_key"].isin(any_look_keys(ratios, ROW)),
    ).drop(columns=["reference", "_key"])


# How much of the communication of a scaling point is hidden behind computation.


EXPOSED_COLUMNS = (
    "curve scaling cell_id world_size step_ms compute_ms exposed_ms exposed_ms_low "
    "exposed_ms_high communication_ms overlapped_ms rest_ms exposed_share num_blocks note"
).split()


def exposed_communication(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    curves: DataFrame | None = None,
) -> DataFrame:
    """Tell how much of the communication of every scaling point is hidden behind computation.

    compute = step of the smallest world x images per rank / its images per rank; exposed = step - compute
    (paired within blocks, Student's t), at most communication_ms, and missing where that was not
    measured; overlapped = communication_ms - exposed, at least 0; rest = step - compute - exposed. An exposed
    time that is all of communication_ms has no interval. Where the smallest world has several
    ranks, its own exposed time counts as computation. Worlds that never shared a block have the difference
    of their means, without an interval, and a note.

    Returns:
        One row per point that has an efficiency, times in ms of one step. `exposed_share` is of the step.

    Raises:
        VitsweepError: a column is missing, a number is text, or the points ran on different devices.
    """
    runs = checked_runs(runs, "images_per_step", "world_size")
    if not (runs["status"] == Status.measured).any():
        return DataFrame(columns=EXPOSED_COLUMNS)
    found = scaling_efficiency(runs, baselines) if curves is None else curves
    usable = valid_runs(runs).dropna(subset=["images_per_second", "images_per_step"])
    step_ms = 1000 * usable["images_per_step"].astype(float) / usable["images_per_second"]
    steps = usable.assign(step_ms=step_ms)
    groups = found[found["efficiency"].notna()].groupby(["scaling", "curve"], sort=False)
    rows = [row for _, points in groups if len(points) > 1 for row in _exposed(points, steps)]
    return DataFrame(rows, columns=EXPOSED_COLUMNS)


_SHOWN: dict[str, Column] = {
    "curve": values("curve"),
    "ranks": values("world_size"),
    "step ms": values("step_ms", number),
    "compute ms": values("compute_ms", number),
    "exposed ms": with_interval("exposed_ms", number, number),
    "overlapped ms": values("overlapped_ms", number),
    "communication ms": values("communication_ms", number),
    "rest ms": values("rest_ms", number),
    "exposed of step": values("exposed_share", percent),
    "blocks": values("num_blocks"),
    "note": values("note"),
}


def exposed_text(table: DataFrame) -> DataFrame:
    """Return `exposed_communication` as text, for the points with several ranks; times in ms per step.

    Empty where no point sends anything or was compared with a smaller world.
    """
    if table.empty:
        return DataFrame()
    known = table[["exposed_ms", "communication_ms"]].notna().all(axis=1)
    return text_columns(table[(table["world_size"] > 1) & known], _SHOWN)


def _exposed(points: DataFrame, steps: DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the rows of one curve, smallest world first; `steps` has `step_ms` of each run.

    Blocks of different jobs are not matched: a difference between two jobs would count as noise.
    """
    cells = list(points["cell_id"])
    by_block = steps[steps["cell_id"].isin(cells)].pivot_table(
        index=["sweep", "block"], columns="cell_id", values="step_ms", observed=True, sort=False
    )
    by_block = by_block.reindex(columns=cells)
    whole = by_block.dropna()  # blocks that hold all sizes
    ms = (whole if len(whole) else by_block.mean().to_frame().T).to_numpy(float)
    per_rank = (points["images_per_step"].astype(float) / points["world_size"]).tolist()
    for i, point in enumerate(points.to_dict("records")):
        compute = ms[:, 0] * per_rank[i] / per_rank[0]
        total = float(point.get("communication_ms", np.nan))
        if point["world_size"] == 1 and missing(total):
            total = 0.0
        longer, *ends = mean_interval(ms[:, i] - compute)
        exposed, low, high = np.minimum([longer, *ends], total).tolist()
        has_interval = i and not longer > total
        yield {
            "curve": point["curve"],
            "scaling": point["scaling"],
            "cell_id": point["cell_id"],
            "world_size": int(point["world_size"]),
            "step_ms": float(ms[:, i].mean()),
            "compute_ms": float(compute.mean()),
            "exposed_ms": exposed,
            "exposed_ms_low": low if has_interval else np.nan,
            "exposed_ms_high": high if has_interval else np.nan,
            "communication_ms": total,
            "overlapped_ms": max(total - max(exposed, 0.0), 0.0),
            "rest_ms": longer - exposed,
            "exposed_share": exposed / float(ms[:, i].mean()),
            "num_blocks": len(whole),
            "note": "" if len(whole) else say("unpaired", what=SMALLEST),
        }
