"""How throughput grows with the number of ranks."""

from collections.abc import Iterator, Mapping

import pandas as pd
from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.columns import comparable, spec_columns
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.tidy import one_device

SIZES = ("nodes", "ranks_per_node", "world_size", "images_per_step", "batch", "measurement")
SIZE_FIELDS = ("mesh.", "resources.", "batch.images_per_step", "batch.scope")
"""What may differ between the points of one scaling curve."""


def scaling_efficiency(
    runs: DataFrame, baselines: Mapping[str, str | None], mixed_hardware: bool = False
) -> DataFrame:
    """Return one row per cell of every scaling curve, smallest world first.

    `scaling` is `strong` (the images of a step stay) or `weak` (the images per rank stay); a curve
    has the same spec otherwise and at least two world sizes, of several meshes for one world size
    the fastest. With n ranks and the smallest world n0, efficiency = throughput(n) /
    (n / n0 x throughput(n0)), which for strong scaling is T(n0) n0 / (n T(n)). The ratio is paired
    within blocks where both ran in one; otherwise it is that of the medians, without interval.
    `speedup` is over the cell's own baseline, at the same number of ranks.

    Raises:
        VitsweepError: the points ran on different devices (unless `mixed_hardware`).
    """
    table = cells(runs, baselines)
    measured = table[table["status"] == Status.measured].pipe(one_device, mixed_hardware)
    curves = list(_curves(measured))
    if not curves:
        return DataFrame(columns=["curve", "scaling", *measured.columns, *_ADDED])
    return pd.concat([_against_smallest(curve, runs) for curve in curves], ignore_index=True)


_ADDED = [
    "reference_world_size",
    "relative_throughput",
    "efficiency",
    "efficiency_low",
    "efficiency_high",
    "efficiency_blocks",
]


def _curves(measured: DataFrame) -> Iterator[DataFrame]:
    same = [c for c in spec_columns(measured) if c not in SIZES and not c.startswith(SIZE_FIELDS)]
    keyed = measured.assign(
        images_per_rank=measured["images_per_step"] / measured["world_size"],
        curve=comparable(measured[same]).agg("|".join, axis=1) if len(measured) else "",
    )
    for scaling, kept in (("strong", "images_per_step"), ("weak", "images_per_rank")):
        for _, curve in keyed.groupby(["curve", kept], sort=False):
            fastest = curve.sort_values("images_per_second").drop_duplicates(
                "world_size", keep="last"
            )
            if len(fastest) > 1:
                name = f"{scaling} {fastest['cell_id'].min()}"
                yield fastest.sort_values("world_size").assign(scaling=scaling, curve=name)


def _against_smallest(curve: DataFrame, runs: DataFrame) -> DataFrame:
    smallest = curve.iloc[0]
    paired = (
        speedup_over(
            runs[runs["cell_id"].isin(curve["cell_id"])],
            dict.fromkeys(curve["cell_id"], smallest["cell_id"]),
        )
        .set_index("cell_id")
        .loc[curve["cell_id"]]
    )
    growth = (curve["world_size"] / smallest["world_size"]).to_numpy(float)
    of_medians = (curve["images_per_second"] / smallest["images_per_second"]).to_numpy(float)
    relative = paired["speedup"].where(paired["speedup"].notna(), of_medians).to_numpy(float)
    return curve.assign(
        reference_world_size=smallest["world_size"],
        relative_throughput=relative,
        efficiency=relative / growth,
        efficiency_low=paired["speedup_low"].to_numpy(float) / growth,
        efficiency_high=paired["speedup_high"].to_numpy(float) / growth,
        efficiency_blocks=paired["num_blocks"].to_numpy(),
    )
