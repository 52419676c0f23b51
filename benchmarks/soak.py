#!/usr/bin/env python3
"""A sweep of many short cells with a fault every few seconds.

    python benchmarks/soak.py                  # 1,000 cells of half a second on Slurm, a fault every 5 s
    python benchmarks/soak.py --cells 100 --every 5
    python benchmarks/soak.py --launcher allocation --cells 20 --minutes 4 --seed 1 --out FOLDER

On Slurm it starts one of four nodes on this machine (slurm/local_cluster.py); the nodes of an allocation
are addresses of this machine. The faults are those of the tests (tools/chaos.py and the two beside it):
killed ranks, agents, coordinators, fork servers, commands and nodes, stopped ranks and agents, cancelled,
requeued and preempted jobs, a dead controller, commands that die while they submit, readers. They go on
until every cell is measured. Then each cell must have one row and one measurement, none may be thrown
away, and no process or job may be left; the exit code is 1 otherwise.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kept import RESULTS, keep  # noqa: E402
from slurm_here import cluster  # noqa: E402

from tests.command import Command  # noqa: E402
from tests.launchers.slurm.conftest import SlurmClient  # noqa: E402
from tests.launchers.slurm.sweeps import SMALL  # noqa: E402
from tools.allocation_chaos import TWO_OF_THREE_NODES, AllocationChaos  # noqa: E402
from tools.chaos import Chaos  # noqa: E402
from tools.slurm_chaos import PREEMPTED_WITHOUT_GRACE, SlurmChaos  # noqa: E402

CELL = ("measurement.measured_steps=4", "measurement.min_seconds=0.3", "sweep.baseline=null")
JOBS = (
    "resources.ranks_per_node=1", "hydra.launcher.cells_per_job=25", "hydra.launcher.array_parallelism=4",
)  # fmt: skip


def main() -> int:
    """Run the sweep under faults, check what is left of it, and keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--launcher", choices=["slurm", "local", "allocation"], default="slurm")
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--minutes", type=float, default=60.0, help="no faults after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with chaos_of(options) as chaos:
        figures = soak(chaos, options)
    keep(f"soak_{options.cells}", figures, options.out)
    return 1 if figures["losses"] else 0


@contextmanager
def chaos_of(options: argparse.Namespace) -> Iterator[Chaos]:
    """Hold a sweep of the launcher, and what strikes it."""
    asked, of_sweep = ("-m", f"seed=range(0,{options.cells})", *CELL), (options.cells, options.seed)
    if options.launcher == "slurm":
        with cluster() as (folder, slurm):
            words = (*asked, *SMALL, *JOBS, PREEMPTED_WITHOUT_GRACE)
            yield SlurmChaos(Command(folder), words, *of_sweep, SlurmClient(slurm))
        return
    with tempfile.TemporaryDirectory(prefix="vitsweep-") as folder:
        if options.launcher == "local":
            yield Chaos(Command(Path(folder)), asked, *of_sweep)
        else:
            yield AllocationChaos(Command(Path(folder)), (*asked, *TWO_OF_THREE_NODES), *of_sweep)


def soak(chaos: Chaos, options: argparse.Namespace) -> dict[str, object]:
    """Return how often each fault struck, and what became of the cells."""
    begin = time.monotonic()
    try:
        chaos.run(60 * options.minutes, (options.every, options.every))
        under_faults_s = time.monotonic() - begin
        commands = chaos.recover()
        seconds = time.monotonic() - begin
        losses = chaos.losses()
    finally:
        chaos.close()
    runs = list(chaos.vitsweep.store.runs())
    for loss in losses:
        print(f"LOSS: {loss}")
    figures = {
        "launcher": options.launcher,
        "seed": options.seed,
        "cells": options.cells,
        "minutes_under_faults": round(under_faults_s / 60, 1),
        "minutes": round(seconds / 60, 1),
        "faults": sum(chaos.struck.values()),
        "struck": dict(sorted(chaos.struck.items())),
        "commands_after_the_faults": commands,
        "rows": len(chaos.vitsweep.cells()),
        "runs": dict(Counter(str(run.status) for run in runs)),
        "losses": losses,
    }
    print(figures)
    return figures


if __name__ == "__main__":
    sys.exit(main())
