"""A race of 96 cells and the full grid of five blocks, one after the other on this machine.

    python -m benchmarks.race_here FOLDER [--seconds 1.5] [--keep]

Runs both sweeps below FOLDER, or continues them, and compares: after which part of the grid's runs and time
the race ended, and how far its leader is below the grid's fastest cell, by the grid's blocks alone and by the
runs of both. Log throughputs are estimated by least squares with effects of cells and blocks; `half_width` is
that of an interval of 95 %. The fastest cell was chosen by the same runs, so its lead is too large by
chance: `lead_by_chance` is the mean lead that the fastest of 96 equal cells would have.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame
from scipy import stats

import vitsweep
from vitsweep.tables.blocks import within_blocks

CELLS = [
    "model=vit_nano",
    "batch.images_per_step=64",
    "resources.ranks_per_node=1",
    "precision=fp32,O1,bf16,bf16_params",
    "optimizer=adamw_loop,adamw_foreach,adamw_fused",
    "memory=keep_all,recompute_blocks",
    "attention=sdpa_auto,sdpa_math",
    "layout=batch_first,batch_second",
]
BLOCKS = 5
DRAWS = 20_000


def sweep(folder: Path, name: str, *overrides: str, seconds: float) -> vitsweep.Sweep:
    """Run one of the two sweeps, or what is missing of it, and load it."""
    command = [sys.executable, "-m", "vitsweep", "-m", *CELLS, *overrides]
    command += [f"measurement.min_seconds={seconds}", "measurement.prove=none"]
    command += [f"sweep.folder={folder}", f"sweep.name={name}", "sweep.report=false"]
    subprocess.run(command, check=True)
    return vitsweep.load(folder / name)


def leads(runs: DataFrame, leader: str) -> DataFrame:
    """Return `lead, half_width` of every cell over the leader, log throughput, fastest first."""
    found = within_blocks(runs)
    covariance = np.linalg.pinv(found.information) * found.noise**2
    here = found.cells.index(leader)
    variance = np.diag(covariance) + covariance[here, here] - 2 * covariance[here]
    width = stats.t.ppf(0.975, found.degrees) * np.sqrt(np.maximum(variance, 0))
    table = {"cell_id": found.cells, "lead": found.logs - found.logs[here], "half_width": width}
    return DataFrame(table).sort_values("lead", ascending=False, ignore_index=True)


def lead_by_chance(runs: DataFrame) -> float:
    """Return the mean lead of the best of equal cells over any other, by the noise of these runs."""
    found = within_blocks(runs)
    covariance = np.linalg.pinv(found.information) * found.noise**2
    draws = np.random.default_rng(0).multivariate_normal(
        np.zeros(len(found.cells)), covariance, size=DRAWS, method="svd"
    )
    return float(draws.max(axis=1).mean())


def compared(race: vitsweep.Sweep, grid: vitsweep.Sweep) -> dict[str, Any]:
    """Return what the two sweeps say of each other."""
    table = race.race()
    leader = str(table.loc[table["state"] == "leader", "cell_id"].item())
    sweeps = {"race": race, "grid": grid}
    measured = {name: s.runs[s.runs["status"] == "measured"] for name, s in sweeps.items()}
    by_grid = leads(measured["grid"], leader)
    both = leads(pd.concat(measured.values()), leader)
    place = {
        name: int((found["lead"] > 0).sum()) + 1
        for name, found in (("grid", by_grid), ("both", both))
    }
    names = table.set_index("cell_id")["name"]
    return {
        "leader": str(names[leader]),
        "runs": {name: len(runs) for name, runs in measured.items()},
        "minutes": {name: minutes(runs) for name, runs in measured.items()},
        "noise": {name: within_blocks(runs).noise for name, runs in measured.items()},
        "place_of_leader": place,
        "fastest_by_grid": row(by_grid, names),
        "fastest_by_both": row(both, names),
        "lead_by_chance": {name: lead_by_chance(runs) for name, runs in measured.items()},
    }


def row(found: DataFrame, names: "pd.Series[str]") -> dict[str, Any]:
    """Return the first row as a dictionary."""
    first = found.iloc[0]
    return {
        "name": str(names[first["cell_id"]]),
        "lead": float(first["lead"]),
        "half_width": float(first["half_width"]),
    }


def minutes(runs: DataFrame) -> float:
    """Return the time from the start of the first run to that of the last."""
    begun = pd.to_datetime(runs["started_at"])
    return float((begun.max() - begun.min()).total_seconds() / 60)


def main() -> None:
    """Run or continue both sweeps and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="timed window of each run, at least"
    )
    parser.add_argument(
        "--keep", action="store_true", help="write benchmarks/results/race_here-...json"
    )
    options = parser.parse_args()
    folder = options.folder.resolve()
    race = sweep(folder, "race", "sweep.search=race", "sweep.minutes=60", seconds=options.seconds)
    grid = sweep(folder, "grid", f"measurement.blocks={BLOCKS}", seconds=options.seconds)
    found = compared(race, grid) | {"seconds": options.seconds}
    print(found)
    if options.keep:
        from benchmarks.kept import keep

        keep("race_here", found)


if __name__ == "__main__":
    main()
