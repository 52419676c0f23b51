"""Do intervals and claims hold where the first block decides, as on a GPU? Simulated sweeps, numbers only.

    python -m benchmarks.simulated_sweeps [--sweeps 1000] [--processes 2] [--keep]

So many sweeps of 17 cells for each noise of a run (0.5 and 1.5 %) and each drift of the machine over a
sweep (1 and 3 %). Order, pruning, the footnote `drifting` and claims are the product's: `planning.rounds.
grid` chooses the blocks from simulated records, `measure.summarize` judges the steps, `tables.speedup`
claims. The machine is cold: its warm-up run would be 3 % slow, which decays by a factor e with each run.

Of 16 cells beside the baseline 10 are equal to it, two are 2.1 and 3.1 times as fast, one is 8 times as
slow. Two stall in one of 12 steps, for three steps. One is equal once its steps have become 8 % faster, in 3
seconds: warm-up and window are too short for it, and coverage is of the cells without that footnote.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from math import ceil, exp
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame

from benchmarks.kept import keep
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.measure.summarize import is_drifting
from vitsweep.planning.blocks import Block
from vitsweep.planning.rounds import blocks_in_turn, grid
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import RunRecord, Status
from vitsweep.spec.resources import Machine
from vitsweep.tables.speedup import speedup_over

GPU = Machine(device="cuda", cores_per_node=16, devices_per_node=1, described_by="a simulation")
CODE = {"packages": {"torch": "2.11.0"}}
STEP_SECONDS, STEP_NOISE, COLD = 0.1, 0.005, 0.03
STALLS, STALL_STEPS = 1 / 12, 3.0
DRIFT_IN_RUN, SETTLED_SECONDS = 0.08, 3.0
NUM_CELLS = 17
RATIOS = {1: 2.1, 2: 3.1, 3: 0.125}
STALLING, DRIFTING = (4, 5), (6,)
NOISES, DRIFTS = (0.005, 0.015), (0.01, 0.03)


@cache
def sweep() -> tuple[SweepPlan, SweepSettings]:
    """Return 17 cells, the baseline among them, as a GPU measures them."""
    composer = Composer()
    rates = ",".join(f"{n}.3e-4" for n in range(1, NUM_CELLS))
    cells = expand(
        ["model=vit_nano", f"optimizer.learning_rate={rates}", "measurement=standard"], composer
    )
    return plan_of(cells, GPU, composer), sweep_settings(cells[0].tree)


class Bench:
    """A machine that measures blocks.

    Args:
        noise: standard deviation of log(images/s) of a run.
        drift: by which the machine becomes slower over a sweep of five blocks.
        seed: of all that is random.
    """

    def __init__(self, noise: float, drift: float, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.noise, self.drift, self.num_runs = noise, drift, 1
        self.plan, self.settings = sweep()
        [baseline] = {e.baseline_id for e in self.plan.entries.values() if e.baseline_id}
        variants = [c for c in self.plan.entries if c != baseline]
        self.kinds = {baseline: 0} | dict(zip(variants, range(1, NUM_CELLS), strict=True))

    def truth(self, kind: int) -> float:
        """Return the true speedup of a cell: of one that drifts, once it has settled."""
        stalls = 1 + STALLS * STALL_STEPS if kind in STALLING else 1.0
        return RATIOS.get(kind, 1.0) / stalls

    def measured(self, block: Block) -> list[RunRecord]:
        """Return the records of a block."""
        found = []
        for position, entry in enumerate(block.entries):
            kind, wanted = self.kinds[entry.cell_id], entry.spec.measurement
            step = STEP_SECONDS / RATIOS.get(kind, 1.0)
            steps = max(wanted.least_steps, ceil(1.1 * wanted.min_seconds / step))
            times = 1e3 * step * np.exp(self.random.normal(0, STEP_NOISE, steps))
            if kind in STALLING:
                times *= 1 + STALL_STEPS * (self.random.random(steps) < STALLS)
            if kind in DRIFTING:
                at = wanted.warmup_min_seconds + step * np.arange(steps)
                times *= 1 + DRIFT_IN_RUN * np.clip(1 - at / SETTLED_SECONDS, 0, None)
            state = self.random.normal(0, self.noise) - COLD * exp(-self.num_runs)
            state -= self.drift * self.num_runs / (5 * (NUM_CELLS + 1))
            times *= exp(-state)
            drifts = is_drifting(times.tolist())
            found.append(self._record(entry, block, position, 1e3 / times.mean(), drifts))
            self.num_runs += 1
        return found

    def _record(
        self, entry: Any, block: Block, position: int, speed: float, drifts: bool
    ) -> RunRecord:
        wanted = entry.spec.measurement
        lengths = {
            f"measurement.{k}": getattr(wanted, k) for k in ("min_seconds", "warmup_min_seconds")
        }
        begun = pd.Timestamp("2026-01-01", tz="UTC") + pd.Timedelta(self.num_runs, "s")
        facts = {"device": "GPU", "device_type": "cuda", "started_at": begun.isoformat()}
        return RunRecord(
            run_id=f"{block.name}-{position}",
            sweep="simulated",
            cell_id=entry.cell_id,
            block=block.name,
            position=position,
            attempt=1,
            status=Status.measured,
            spec=lengths,
            metrics={"images_per_second": speed},
            validity={"proved": "simulated", "drifting": drifts},
            environment=facts,
        )

    def run(self) -> list[RunRecord]:
        """Return the records of one command."""
        mine: list[RunRecord] = []
        for block in blocks_in_turn(grid(self.plan, self.settings, (), CODE), mine):
            mine += self.measured(block)
        return mine


def simulated(noise: float, drift: float, first: int, sweeps: int) -> DataFrame:
    """Return one row per cell and sweep: its truth, estimate, interval, claim and number of runs."""
    rows, truth, baselines = [], {}, {}
    for seed in range(first, first + sweeps):
        bench = Bench(noise, drift, seed)
        [base] = (c for c, kind in bench.kinds.items() if not kind)
        for cell, kind in bench.kinds.items():
            truth[f"s{seed}/{cell}"] = (kind, bench.truth(kind))
            baselines[f"s{seed}/{cell}"] = f"s{seed}/{base}"
        of_sweep = {"sweep": f"s{seed}"}
        rows += [
            run.row() | of_sweep | {"cell_id": f"s{seed}/{run.cell_id}"} for run in bench.run()
        ]
    runs = DataFrame(rows)
    found = speedup_over(runs, baselines).set_index("cell_id")
    facts = DataFrame.from_dict(truth, orient="index", columns=["kind", "truth"])
    of_cell = runs.groupby("cell_id")
    noted = (of_cell["drifting"].mean() > FLAGS["drifting"].least_share).rename("noted")
    num_runs = of_cell.size().rename("runs")
    return (
        found.join(facts).join(num_runs).join(noted).assign(sweep=found.index.str.split("/").str[0])
    )


def figures(found: DataFrame) -> dict[str, Any]:
    """Return coverage, family-wise error, bias and runs of simulated sweeps."""
    variants = found[found["kind"] > 0]
    shown = variants[variants["speedup_low"].notna()]
    shown = shown[~shown["noted"]]
    inside = (shown["speedup_low"] <= shown["truth"]) & (shown["truth"] <= shown["speedup_high"])
    equal = variants[(variants["truth"] == 1) & ~variants["kind"].isin(DRIFTING)]
    wrong = equal["claim"].isin(["faster", "slower"]).groupby(equal["sweep"]).any()
    drifting = variants[variants["kind"].isin(DRIFTING)]
    bias = {
        "bias_of_equal_cells_percent": np.log(equal["speedup"]),
        "bias_of_drifting_cells_percent": np.log(drifting["speedup"] / drifting["truth"]),
    }
    stalls = shown["kind"].isin(STALLING)
    fast, slow = variants[variants["kind"] < 3], variants[variants["kind"] == 3]
    return {
        "sweeps": found["sweep"].nunique(),
        "coverage": round(float(inside.mean()), 4),
        "coverage_of_stalling_cells": round(float(inside[stalls].mean()), 4),
        "family_wise_error": round(float(wrong.mean()), 4),
        "drifting_cells_with_footnote": round(float(drifting["noted"].mean()), 4),
        "other_cells_with_footnote": round(
            float(variants[~variants["kind"].isin(DRIFTING)]["noted"].mean()), 4
        ),
        **{name: round(100 * float(logs.mean()), 4) for name, logs in bias.items()},
        "fast_cells_claimed": round(float(fast["claim"].eq("faster").mean()), 4),
        "runs_of_slow_cells": round(float(slow["runs"].mean()), 3),
        "runs_per_sweep": round(float(found.groupby("sweep")["runs"].sum().mean()), 1),
    }  # fmt: skip


def main() -> None:
    """Print the figures of each noise and drift, and keep them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    begin, chunk, kept = time.monotonic(), 50, []
    with ProcessPoolExecutor(arguments.processes) as pool:
        jobs = {
            (noise, drift): [
                pool.submit(simulated, noise, drift, first, min(chunk, arguments.sweeps - first))
                for first in range(0, arguments.sweeps, chunk)
            ]
            for noise in NOISES
            for drift in DRIFTS
        }
        for (noise, drift), parts in jobs.items():
            found = pd.concat([part.result() for part in parts])
            kept.append({"noise": noise, "drift": drift, **figures(found)})
            print(kept[-1], flush=True)
    if arguments.keep:
        keep("simulated_sweeps", {"conditions": kept, "seconds": round(time.monotonic() - begin)})


if __name__ == "__main__":
    main()
