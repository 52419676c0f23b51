"""Simulated sweeps with known speedups under named kinds of noise, to check intervals and claims.

A kind of noise is a function `(generator, positions) -> logs`. `positions` has the shape (sweeps,
blocks, cells) and says as which run of its block (from 0) each cell ran; `logs` has the same shape
and is added to log(images/s). Effects of a whole block are added apart: they are shared by its runs.

    runs, baselines = simulate({"base": 1.0, "fast": 1.3}, heavy_tailed(0.03), generator, sweeps=2000)
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from tests.builders import ENVIRONMENT, PLAIN
from vitsweep.results.record import SCHEMA_VERSION, Status

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]
Noise = Callable[[np.random.Generator, Positions], Floats]
Order = Callable[[np.random.Generator, tuple[int, int, int]], Positions]

START = np.datetime64("2026-10-20T10:00:00")


def normal(spread: float = 0.03) -> Noise:
    """Independent normal noise; `spread` is the standard deviation of log(images/s) of one run."""
    return lambda generator, positions: generator.normal(0.0, spread, positions.shape)


def heavy_tailed(spread: float = 0.03, degrees: int = 3) -> Noise:
    """Student's t noise, scaled to the standard deviation `spread`: a few runs are far off."""
    scale = spread / np.sqrt(degrees / (degrees - 2))
    return lambda generator, positions: scale * generator.standard_t(degrees, positions.shape)


def slow_tailed(spread: float = 0.03, share: float = 0.1, slowdown: float = 0.15) -> Noise:
    """Normal noise, and a `share` of the runs is slower by `slowdown`: a neighbour on the machine."""

    def noise(generator: np.random.Generator, positions: Positions) -> Floats:
        slow = generator.random(positions.shape) < share
        return generator.normal(0.0, spread, positions.shape) + np.log1p(-slowdown) * slow

    return noise


def cold_first_run(spread: float = 0.03, slowdown: float = 0.06, every_block: bool = True) -> Noise:
    """Normal noise, and the first run is slower by `slowdown`.

    Of every block (the machine rested in between), or only of a sweep's first block.
    """

    def noise(generator: np.random.Generator, positions: Positions) -> Floats:
        first = positions == 0
        if not every_block:
            first[:, 1:, :] = False
        return generator.normal(0.0, spread, positions.shape) + np.log1p(-slowdown) * first

    return noise


def drifting(spread: float = 0.03, slowdown: float = 0.10, over: str = "sweep") -> Noise:
    """Normal noise, and every run is slower than the run before, `slowdown` from first to last.

    Over the whole `sweep` (a room that warms up), or over each `block` (a GPU that warms up and
    cools down between blocks).
    """

    def noise(generator: np.random.Generator, positions: Positions) -> Floats:
        _, blocks, cells = positions.shape
        before = np.arange(blocks)[:, None] * cells if over == "sweep" else 0
        last = blocks * cells - 1 if over == "sweep" else cells - 1
        slope = np.log1p(-slowdown) / max(last, 1)
        return generator.normal(0.0, spread, positions.shape) + slope * (before + positions)

    return noise


def autocorrelated(spread: float = 0.03, correlation: float = 0.3) -> Noise:
    """AR(1) from block to block: a cell's noise keeps `correlation` of its noise in the block before.

    Ratios of two cells have the same correlation between neighbouring blocks.
    """

    def noise(generator: np.random.Generator, positions: Positions) -> Floats:
        logs = generator.normal(0.0, spread, positions.shape)
        for block in range(1, positions.shape[1]):
            logs[:, block] *= np.sqrt(1 - correlation**2)
            logs[:, block] += correlation * logs[:, block - 1]
        return logs

    return noise


def run_to_run(spread: float = 0.03, correlation: float = 0.6) -> Noise:
    """AR(1) from run to run in the order of time, across blocks: neighbours in time are alike."""

    def noise(generator: np.random.Generator, positions: Positions) -> Floats:
        sweeps, blocks, cells = positions.shape
        logs = generator.normal(0.0, spread, (sweeps, blocks * cells))
        for run in range(1, blocks * cells):
            logs[:, run] *= np.sqrt(1 - correlation**2)
            logs[:, run] += correlation * logs[:, run - 1]
        return np.take_along_axis(logs.reshape(positions.shape), positions, axis=2)

    return noise


NOISES: dict[str, Noise] = {
    "normal": normal(),
    "heavy_tailed": heavy_tailed(),
    "cold_first_run": cold_first_run(),
    "drifting": drifting(),
    "autocorrelated": autocorrelated(),
}
"""The kinds of noise that every interval is checked with, 3 % from run to run."""


def shuffled(generator: np.random.Generator, shape: tuple[int, int, int]) -> Positions:
    """Every block in a random order of its own."""
    return generator.permuted(np.broadcast_to(np.arange(shape[2]), shape), axis=2)


def rotated(generator: np.random.Generator, shape: tuple[int, int, int]) -> Positions:
    """A cyclic Latin square over shuffled cells: in n blocks of n cells each is once in each place."""
    first = generator.permuted(np.broadcast_to(np.arange(shape[2]), (shape[0], shape[2])), axis=1)
    return (first[:, None, :] + np.arange(shape[1])[None, :, None]) % shape[2]


def as_listed(generator: np.random.Generator, shape: tuple[int, int, int]) -> Positions:
    """Every block in the order of the cells, the baseline first."""
    return np.broadcast_to(np.arange(shape[2]), shape).copy()


def simulate(
    speedups: Mapping[str, float],
    noise: Noise,
    generator: np.random.Generator,
    *,
    num_blocks: int = 5,
    sweeps: int = 1,
    order: Order = shuffled,
    block_spread: float = 0.2,
    baseline_images_per_second: float = 100.0,
    specs: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> tuple[DataFrame, dict[str, str | None]]:
    """Return the runs of simulated sweeps, in the columns of the store, and the baselines.

    Args:
        speedups: cell -> its true speedup over the first cell, which is the baseline.
        noise: what is added to log(images/s) of each run.
        generator: source of randomness.
        num_blocks: blocks of each sweep.
        sweeps: independent sweeps of the same cells. With more than one, cells are named
            `s12/fast`, the sweep `s12`, so that one table function sees them all at once.
        order: positions of the cells within their blocks.
        block_spread: standard deviation of a block's effect on log(images/s).
        baseline_images_per_second: throughput of the baseline without noise.
        specs: cell -> spec columns that differ from the plain ones.
        environment: environment columns that differ from the plain ones.

    Returns:
        One row per run in the order of time, and cell -> baseline cell.
    """
    names, shape = list(speedups), (sweeps, num_blocks, len(speedups))
    positions = order(generator, shape)
    blocks = generator.normal(0.0, block_spread, shape[:2])[:, :, None]
    logs = np.log(list(speedups.values())) + blocks + noise(generator, positions)
    sweep, block, cell = (index.ravel() for index in np.indices(shape))
    prefixes = np.array([f"s{i}/" if sweeps > 1 else "" for i in range(sweeps)], dtype=object)
    cell_ids = prefixes[sweep] + np.array(names, dtype=object)[cell]
    minutes = block * len(names) + positions.ravel()
    runs = DataFrame(
        {
            "schema_version": SCHEMA_VERSION,
            "run_id": [f"{c}-b{b}" for c, b in zip(cell_ids, block, strict=True)],
            "cell_id": cell_ids,
            "sweep": [f"s{i}" for i in sweep] if sweeps > 1 else "sample",
            "block": [f"b{i}" for i in block],
            "position": positions.ravel(),
            "attempt": 1,
            "status": str(Status.measured),
            "reason": "",
            "failed_rank": None,
            **PLAIN,
            **_varied(specs or {}, names, cell),
            "images_per_second": baseline_images_per_second * np.exp(logs).ravel(),
            **ENVIRONMENT,
            **(environment or {}),
            "started_at": np.datetime_as_string(START + minutes.astype("timedelta64[m]")),
        }
    )
    in_time = runs.iloc[np.lexsort((positions.ravel(), block, sweep))].reset_index(drop=True)
    baselines = {f"{p}{name}": f"{p}{names[0]}" for p in prefixes for name in names}
    return in_time.assign(started_at=in_time["started_at"] + "+00:00"), dict(baselines)


def _varied(
    specs: Mapping[str, Mapping[str, Any]], names: list[str], cell: Positions
) -> dict[str, list[Any]]:
    columns = dict.fromkeys(column for spec in specs.values() for column in spec)
    of_cell = {c: [specs.get(n, {}).get(c, PLAIN.get(c)) for n in names] for c in columns}
    return {column: [values[i] for i in cell] for column, values in of_cell.items()}


def coverage(table: DataFrame, truth: float, column: str = "speedup") -> float:
    """Return the share of the shown intervals `<column>_low, <column>_high` that hold the truth."""
    shown = table[table[f"{column}_low"].notna()]
    return float((shown[f"{column}_low"].le(truth) & shown[f"{column}_high"].ge(truth)).mean())
