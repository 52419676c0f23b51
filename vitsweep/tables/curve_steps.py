"""Step times of every scaling curve, block by block: what fits and exposed communication start from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame
from scipy.special import stdtrit

from vitsweep.results.record import Status
from vitsweep.tables.checks import checked_runs
from vitsweep.tables.communication import PURPOSES
from vitsweep.tables.ratios import LEVEL, MIN_BLOCKS
from vitsweep.tables.scaling import scaling_efficiency
from vitsweep.tables.status import counted

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CurveSteps:
    """The points of one curve, smallest world first, and their step times by block.

    Attributes:
        name: as in `scaling_efficiency`.
        kind: `strong` or `weak`.
        points: one row per size.
        step_ms: blocks x sizes.
        left_out: sizes that were oversubscribed.
    """

    name: str
    kind: str
    points: DataFrame
    step_ms: Floats
    left_out: list[int]

    @property
    def ranks(self) -> Floats:
        """World sizes."""
        return self.points["world_size"].to_numpy(float)

    @property
    def images(self) -> Floats:
        """Images of a step."""
        return self.points["images_per_step"].to_numpy(float)

    @property
    def bytes_per_step(self) -> Floats:
        """Bytes sent per rank and step; NaN where none were counted on several ranks."""
        counted = [c for c in PURPOSES if c in self.points]
        total = self.points[counted].astype(float).sum(axis=1, min_count=1).to_numpy(float)
        return np.where(self.ranks == 1, 0.0, total)

    @property
    def communication_ms(self) -> Floats:
        """Time inside collectives of one step; NaN where it was not profiled."""
        if "communication_ms" not in self.points:
            return np.full(len(self.points), np.nan)
        return self.points["communication_ms"].to_numpy(float)


def curve_steps(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    mixed_hardware: bool,
    all_points: bool = False,
) -> Iterator[CurveSteps]:
    """Yield every curve of `scaling_efficiency` with the step times of its sizes.

    Sizes that share fewer than `MIN_BLOCKS` blocks are matched in the order in which they ran.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline, None where it has none.
        mixed_hardware: take points of different devices together.
        all_points: keep the oversubscribed ones, whose ranks shared cores.

    Raises:
        VitsweepError: a column is missing, a number is text, or the points ran on different devices
            (unless `mixed_hardware`).
    """
    runs = checked_runs(runs, "images_per_step", "world_size")
    if runs.empty or not (runs["status"] == Status.measured).any():
        return
    steps = _step_ms(runs)
    curves = scaling_efficiency(runs, baselines, mixed_hardware)
    curves["oversubscribed"] = (
        curves["oversubscribed"].eq(True).fillna(False).astype(bool)
        if "oversubscribed" in curves
        else False
    )
    for (kind, name), points in curves.groupby(["scaling", "curve"], sort=False):
        usable = points if all_points else points[~points["oversubscribed"]]
        left_out = sorted(map(int, set(points["world_size"]) - set(usable["world_size"])))
        times = _by_block(steps, list(usable["cell_id"]))
        yield CurveSteps(str(name), str(kind), usable, times, left_out)


def _step_ms(runs: DataFrame) -> DataFrame:
    """Return `cell_id, sweep, block, step_ms`: mean time of a step, from images and throughput."""
    measured = counted(runs)
    usable = measured.dropna(subset=["images_per_second", "images_per_step"])
    step = 1000 * usable["images_per_step"].astype(float) / usable["images_per_second"]
    return (
        usable.assign(step_ms=step)
        .groupby(["cell_id", "sweep", "block"], observed=True, sort=False)["step_ms"]
        .mean()
        .reset_index()
    )


def _by_block(steps: DataFrame, cells: list[str]) -> Floats:
    """Return blocks x cells; where too few blocks hold all cells, their n-th blocks are matched."""
    mine = steps[steps["cell_id"].isin(cells)]
    if mine.empty or not cells:
        return np.zeros((0, len(cells)))
    wide = mine.pivot_table(
        index=["sweep", "block"], columns="cell_id", values="step_ms", observed=True, sort=False
    ).reindex(columns=cells)
    whole = wide.dropna()
    samples = [mine.loc[mine["cell_id"] == cell, "step_ms"].to_numpy(float) for cell in cells]
    fewest = min(len(s) for s in samples)
    if len(whole) >= min(MIN_BLOCKS, fewest):
        return whole.to_numpy(float)
    return np.column_stack([s[:fewest] for s in samples])


def over_blocks(values: Floats) -> tuple[float, float, float]:
    """Return mean and 95 % interval (Student's t) over blocks."""
    middle = float(values.mean()) if len(values) else float("nan")
    if len(values) < MIN_BLOCKS:
        return middle, float("nan"), float("nan")
    error = float(values.std(ddof=1)) / np.sqrt(len(values))
    half = float(stdtrit(len(values) - 1.0, 1 - LEVEL / 2)) * error
    return middle, middle - half, middle + half
