#!/usr/bin/env python3
"""What a sweep costs beside its training: on a cluster, packed and not, beside the stock launcher.

    python benchmarks/sweep_overhead.py                   # 64 short cells of real training, three ways
    python benchmarks/sweep_overhead.py --cells 16 --local
    python benchmarks/sweep_overhead.py --many 10000      # planning, submitting, collecting many cells

Starts a Slurm of four nodes on this machine (slurm/local_cluster.py), runs the same cells through
vitsweep packed, vitsweep with one cell per job, and hydra-submitit-launcher, one after the other,
and writes the wall-clock seconds with the machine and the date to benchmarks/results/. With --many
the jobs do a trivial task: they write a record for each cell and train nothing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kept import keep  # noqa: E402
from slurm_here import cluster  # noqa: E402

SWEEP = "overhead"
CELL = (
    "model.depth=2", "model.width=64", "model.mlp_width=128", "batch.images_per_step=32",
    "measurement=smoke", "resources.ranks_per_node=2", "resources.threads_per_rank=1",
    "sweep.baseline=null", f"sweep.name={SWEEP}",
)  # fmt: skip
OURS = ("hydra/launcher=slurm_local_cluster", "hydra.launcher.minutes_per_run=0.1")
WAYS = {
    "vitsweep, packed": (*OURS, "hydra.launcher.minutes_per_job=3"),
    "vitsweep, one cell per job": (*OURS, "hydra.launcher.cells_per_job=1"),
    "hydra-submitit-launcher": (
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.tasks_per_node=2",
        "hydra.launcher.timeout_min=60",
    ),
}


def vitsweep(folder: Path, *arguments: str) -> dict[str, float]:
    """Run a command; return its wall-clock and CPU seconds, and the peak memory so far in MiB."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "vitsweep", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(cpu_s, 1),
        "peak_mib": round(after.ru_maxrss / 1024),
    }


def three_ways(folder: Path, cells: int) -> dict[str, Any]:
    """Return wall-clock seconds per way, and how often packed vitsweep is faster than stock."""
    seconds = {}
    for way, overrides in WAYS.items():
        own = folder / way.replace(" ", "-").replace(",", "")
        own.mkdir()
        used = vitsweep(own, "-m", f"seed=range(0,{cells})", *CELL, *overrides)
        seconds[way] = used["seconds"]
        records = list((own / "results" / SWEEP / "cells").glob("*/runs/*.json"))
        assert len(records) == cells, f"{way}: {len(records)} records of {cells}"
        print(f"{way:28} {seconds[way]:8.1f} s for {cells} cells", flush=True)
    stock = seconds["hydra-submitit-launcher"]
    return {
        "cells": cells,
        "seconds": seconds,
        "stock_over_packed": round(stock / seconds["vitsweep, packed"], 2),
        "stock_over_unpacked": round(stock / seconds["vitsweep, one cell per job"], 2),
    }


def local_cell(folder: Path) -> dict[str, float]:
    """Return what a two-rank cell on this machine costs beside its own work, in seconds.

    `beside_cell`: fresh processes, process group, record: all but model, steps and instrumented steps
    (the time within `run_cell`). `beside_steps`: all but the timed steps.
    """
    own = folder / "local"
    own.mkdir()
    vitsweep(own, "-m", "seed=range(0,7)", *CELL)
    beside: dict[str, list[float]] = {"beside_cell": [], "beside_steps": []}
    for life in own.glob(f"results/{SWEEP}/cells/*/attempts.jsonl"):
        begin, end = [
            json.loads(line)["time"] for line in life.read_text(encoding="utf-8").splitlines()
        ]
        record = json.loads(next(life.parent.glob("runs/*.json")).read_text(encoding="utf-8"))
        steps_s = max(sum(times) for times in record["samples"]["step_time_ms"]) / 1000
        beside["beside_cell"].append(end - begin - record["environment"]["run_seconds"])
        beside["beside_steps"].append(end - begin - steps_s)
    figures = {name: round(median(seconds), 2) for name, seconds in beside.items()}
    print(f"seconds that a two-rank cell here costs beside its own work: {figures}", flush=True)
    return figures


def many(folder: Path, cells: int) -> dict[str, Any]:
    """Plan, submit and collect `cells` cells whose jobs train nothing; cancel as many that wait."""
    own = folder / "many"
    own.mkdir()
    command = ("-m", f"seed=range(0,{cells})", *CELL)
    trivial = f"hydra.launcher.python=[{sys.executable},{ROOT / 'benchmarks' / 'trivial_job.py'}]"
    packed = (*OURS, trivial, "hydra.launcher.cells_per_job=20", "hydra.launcher.wait=false")
    figures: dict[str, Any] = {"cells": cells}

    def used(name: str, *arguments: str) -> None:
        figures[name] = vitsweep(own, *arguments)
        print(f"{name:8} {figures[name]}", flush=True)

    used("plan", "plan", *command[1:], *OURS)
    used("submit", *command, *packed)
    begin, jobs = time.monotonic(), own / "results" / SWEEP / "jobs"
    asked_for = sum(
        json.loads(p.read_text(encoding="utf-8"))["num_jobs"] for p in jobs.glob("*/array.json")
    )
    while len(list(jobs.glob("*/*.done"))) < asked_for:
        time.sleep(1)
    figures["jobs"] = {"number": asked_for, "seconds": round(time.monotonic() - begin, 1)}
    print(f"jobs     {figures['jobs']}", flush=True)
    used("status", "status")
    used("collect", "collect")
    hold = "+hydra.launcher.additional_parameters.hold=true"
    vitsweep(own, *command, *packed, hold, "sweep.name=waiting")
    used("cancel", "cancel", "waiting")
    return figures


def main() -> None:
    """Run the chosen measurement and keep its figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--many", type=int, default=0, metavar="N")
    parser.add_argument("--local", action="store_true", help="only the launcher of this machine")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with cluster() as (folder, _):
        if options.many:
            name, figures["many"] = f"sweep_many_{options.many}", many(folder, options.many)
        elif options.local:
            name, figures["local"] = "cell_overhead", local_cell(folder)
        else:
            name, figures["local"] = "sweep_overhead", local_cell(folder)
            figures["cluster"] = three_ways(folder, options.cells)
    keep(name, figures)


if __name__ == "__main__":
    main()
