"""Strong and weak scaling: throughput and efficiency by number of ranks."""

from collections.abc import Mapping

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.checks import checked_runs, row_keys, separated
from vitsweep.tables.columns import comparable, spec_columns, varying
from vitsweep.tables.names import cell_names
from vitsweep.tables.ratios import (
    contrast,
    estimate,
    log_ratios,
    log_throughput_per_block,
    samples,
)
from vitsweep.tables.status import counted
from vitsweep.tables.tidy import one_device

SIZES = ("nodes", "ranks_per_node", "world_size", "images_per_step", "batch", "measurement")
SIZE_FIELDS = ("mesh.", "resources.", "batch.images_per_step", "batch.scope")
"""Columns that may differ between the points of one scaling curve."""


def scaling_efficiency(
    runs: DataFrame, baselines: Mapping[str, str | None], mixed_hardware: bool = False
) -> DataFrame:
    """Return one row per cell of every scaling curve, smallest world first.

    `scaling` is `strong` (images per step constant) or `weak` (images per rank constant). A curve
    has the same spec otherwise and at least two world sizes; `curve` names it by what tells it
    apart. Where several meshes have the same world size, the fastest is taken. With n ranks and the
    smallest world n0, efficiency =
    throughput(n) / (n / n0 x throughput(n0)), which for strong scaling is T(n0) n0 / (n T(n)). The
    ratio is paired within blocks where both ran in one; otherwise the blocks of each are independent
    samples, and the interval (Welch's) includes differences between blocks. `speedup` is over the
    cell's own baseline, at the same number of ranks.

    Raises:
        VitsweepError: the points ran on different devices (unless `mixed_hardware`).
    """
    checked = checked_runs(runs, "device", "world_size", "images_per_step")
    apart, _, original = separated(checked, baselines)
    table = cells(checked, baselines)
    measured = table[table["status"] == Status.measured].dropna(subset=["world_size"])
    keyed = measured.pipe(one_device, mixed_hardware).assign(
        _key=lambda t: row_keys(t) if original else t["cell_id"]
    )
    with_throughput = keyed.dropna(subset=["images_per_second", "images_per_step"])
    per_block = log_throughput_per_block(counted(apart))
    curves = [_against_smallest(_curves(with_throughput, kind), per_block) for kind in KEPT]
    return pd.concat(curves, ignore_index=True)


KEPT = {"strong": "images_per_step", "weak": "images_per_rank"}
"""Kind of scaling -> the column that is constant along a curve."""


def _curves(measured: DataFrame, kind: str) -> DataFrame:
    """Return the points of all curves of one kind, smallest world first."""
    same = [c for c in spec_columns(measured) if c not in SIZES and not c.startswith(SIZE_FIELDS)]
    per_rank = measured["images_per_step"].astype(float) / measured["world_size"]
    keyed = measured.assign(images_per_rank=per_rank, scaling=kind, key=_joined(measured[same]))
    curve = ["key", KEPT[kind]]
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
    return several.assign(curve=_curve_names(several, kind)).drop(columns=["key", "order"])


def _curve_names(points: DataFrame, kind: str) -> Series:
    """Return a name per point, shared by its curve: the kind of scaling, and what tells curves apart."""
    columns = [c for c in varying(points) if c not in SIZES and not c.startswith(SIZE_FIELDS)]
    curve = points["order"]
    names = (f"{kind} · " + cell_names(points, columns)).groupby(curve).transform("first")
    images = points[KEPT[kind]].map(f", {{:g}} img/{'step' if kind == 'strong' else 'rank'}".format)
    for detail in (images, curve.map(" ({})".format)):
        shared = curve.groupby(names).transform("nunique") > 1
        names = names.mask(shared, names + detail)
    return names


def _joined(table: DataFrame) -> list[str]:
    return ["|".join(row) for row in comparable(table).itertuples(index=False)]


def _against_smallest(points: DataFrame, per_block: DataFrame) -> DataFrame:
    references = dict(zip(points["_key"], points["reference"], strict=True))
    paired = estimate(log_ratios(per_block, references)).set_index("cell_id").to_dict("index")
    of_cell = samples(per_block.rename(columns={"log_throughput": "log_ratio"}))
    rows = [
        {"speedup": 1.0}
        if cell == first
        else paired.get(cell) or contrast({cell: 1.0, first: -1.0}, of_cell)
        for cell, first in references.items()
    ]
    columns = ["speedup", "speedup_low", "speedup_high", "num_blocks"]
    ratios = DataFrame(rows, columns=columns, dtype=float)
    growth = (points["world_size"] / points["reference_world_size"]).to_numpy(float)
    relative = ratios["speedup"].to_numpy()
    return points.assign(
        relative_throughput=relative,
        efficiency=relative / growth,
        efficiency_low=ratios["speedup_low"].to_numpy() / growth,
        efficiency_high=ratios["speedup_high"].to_numpy() / growth,
        efficiency_blocks=ratios["num_blocks"].fillna(0).to_numpy(int),
    ).drop(columns=["reference", "_key"])
