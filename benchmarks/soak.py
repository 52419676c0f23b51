#!/usr/bin/env python3
"""A sweep of many short cells on a real Slurm, with a fault every few seconds.

    python benchmarks/soak.py                  # 1,000 cells of half a second, a fault every 5 s
    python benchmarks/soak.py --cells 100 --every 5

Starts a Slurm of four nodes on this machine (slurm/local_cluster.py). The faults are those of the tests
(tools/slurm_chaos.py): killed ranks, agents, coordinators, fork servers and commands, stopped
ranks, cancelled, requeued and preempted jobs, dead nodes, a dead controller, commands that die while
they submit, readers. They go on until every cell is measured. Then each cell must have one row and one
measurement, none may be thrown away, and no process or job may be left; the exit code is 1 otherwise.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kept import keep  # noqa: E402
from slurm_here import cluster  # noqa: E402

from tests.command import Command  # noqa: E402
from tests.launchers.slurm.conftest import SlurmClient  # noqa: E402
from tests.launchers.slurm.sweeps import SMALL  # noqa: E402
from tools.slurm_chaos import PREEMPTED_WITHOUT_GRACE, SlurmChaos  # noqa: E402

CELL = (
    "measurement.measured_steps=4", "measurement.min_seconds=0.3", "resources.ranks_per_node=1",
    "sweep.baseline=null",
)  # fmt: skip
JOBS = ("hydra.launcher.cells_per_job=25", "hydra.launcher.array_parallelism=4")


def main() -> int:
    """Run the sweep under faults, check what is left of it, and keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--minutes", type=float, default=60.0, help="no faults after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with cluster() as (folder, slurm):
        figures = soak(Command(folder), SlurmClient(slurm), options)
    keep(f"soak_{options.cells}", figures)
    return 1 if figures["losses"] else 0


def soak(vitsweep: Command, client: SlurmClient, options: argparse.Namespace) -> dict[str, object]:
    """Return how often each fault struck, and what became of the cells."""
    asked = ("-m", f"seed=range(0,{options.cells})", *SMALL, *CELL, *JOBS, PREEMPTED_WITHOUT_GRACE)
    chaos = SlurmChaos(vitsweep, asked, options.cells, options.seed, client)
    begin = time.monotonic()
    try:
        chaos.run(60 * options.minutes, (options.every, options.every))
        under_faults_s = time.monotonic() - begin
        commands = chaos.recover()
        seconds = time.monotonic() - begin
        losses = chaos.losses()
    finally:
        chaos.close()
    runs = list(vitsweep.store.runs())
    for loss in losses:
        print(f"LOSS: {loss}")
    figures = {
        "cells": options.cells,
        "minutes_under_faults": round(under_faults_s / 60, 1),
        "minutes": round(seconds / 60, 1),
        "faults": sum(chaos.struck.values()),
        "struck": dict(sorted(chaos.struck.items())),
        "commands_after_the_faults": commands,
        "rows": len(vitsweep.cells()),
        "runs": dict(Counter(str(run.status) for run in runs)),
        "losses": losses,
    }
    print(figures)
    return figures


if __name__ == "__main__":
    sys.exit(main())
