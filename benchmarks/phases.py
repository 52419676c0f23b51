"""Do the phases of a step add up to it? Fresh processes on 1 and 2 ranks of one thread, DDP and FSDP.

`python -m benchmarks.phases --out FOLDER` runs each of the four cells in three blocks, through the command
that users type. A probe in each rank times its instrumented steps with a clock of its own. Of the rank whose
phases the record has, their sum is printed over that rank's own instrumented step, which has to be 1, and
over the timed step, which synchronizations between phases may lengthen: 0.9 to 1.15 on an idle machine.
Ten instrumented steps, since of two the median is noise. In 2 minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.results.store import Store
from vitsweep.spec.technique import Memory

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).parents[1]
PHASES = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
GOAL = (0.9, 1.15)


@dataclass(frozen=True, kw_only=True)
class Probe(Memory):
    """Times the instrumented steps of each rank from outside, and writes what it finds.

    Attributes:
        folder: of the files, one per rank and run.
    """

    folder: str

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Put the probe around the instrumented steps; the model stays as it is."""
        from vitsweep import cell
        from vitsweep.training.timed_steps import instrumented_steps

        cell.instrumented_steps = partial(watched, instrumented_steps, Path(self.folder))
        return model


def watched(original: Any, folder: Path, trainer: Any, stream: Any, steps: int) -> dict[str, float]:
    """Take the instrumented steps; keep their phases beside the milliseconds of each."""
    spans: list[float] = []
    step = trainer.step

    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        loss = step(*arguments)
        spans.append(1e3 * (time.perf_counter() - begin))
        return loss

    trainer.step = timed
    try:
        phases: dict[str, float] = original(trainer, stream, steps)
    finally:
        del trainer.step
    name = f"{trainer.world.rank}-{os.getpid()}-{time.time_ns()}.json"
    (folder / name).write_text(json.dumps({"phases": phases, "spans": spans[-steps:]}))
    return phases


def sweep(folder: Path, blocks: int, overrides: list[str]) -> Store:
    """Run the cells; return their folder."""
    (folder / "probes").mkdir(parents=True)
    command = [
        sys.executable, "-m", "vitsweep", "-m", "resources.ranks_per_node=1,2", "sharding=ddp,fsdp",
        "resources.threads_per_rank=1", "measurement.prove=none", "measurement.phase_steps=10",
        "memory._target_=benchmarks.phases.Probe", f"+memory.folder={folder / 'probes'}",
        "sweep.baseline=null", f"sweep.folder={folder}", "sweep.name=phases", f"measurement.blocks={blocks}",
        *overrides,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return Store(folder / "phases")


def rows(store: Store, probes: Path) -> Iterator[dict[str, Any]]:
    """Yield one row per run: the sum of its phases over two steps."""
    known = [json.loads(path.read_text()) for path in sorted(probes.glob("*.json"))]
    for run in store.runs():
        phases = sum(run.metrics[name] or 0.0 for name in PHASES)
        [own] = [k for k in known if abs(sum(k["phases"].values()) - phases) < 1e-6 * phases]
        yield {
            "ranks": run.spec["world_size"],
            "sharding": run.spec["sharding"],
            "block": run.block,
            "phases_ms": round(phases, 3),
            "over_own_step": phases / statistics.median(own["spans"]),
            "over_timed_step": phases / run.metrics["step_time_ms"],
            "shared_device": run.validity["shared_device"],
        }


def main() -> None:
    """Run the cells, print and keep the ratios."""
    from benchmarks.kept import keep

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--keep", type=Path, help="folder of the result; by default benchmarks/results"
    )
    parser.add_argument("--blocks", type=int, default=3)
    options, overrides = parser.parse_known_args()
    folder = options.out.resolve()
    known = rows(sweep(folder, options.blocks, overrides), folder / "probes")
    found = sorted(known, key=lambda row: (row["ranks"], row["sharding"]))
    for row in found:
        print(
            f"{row['ranks']} ranks  {row['sharding']:5} {row['over_own_step']:.4f} of its own step, "
            f"{row['over_timed_step']:.3f} of the timed step"
        )
    within = sum(GOAL[0] <= row["over_timed_step"] <= GOAL[1] for row in found)
    print(f"{within} of {len(found)} runs within {GOAL[0]} and {GOAL[1]} of the timed step")
    figures = {"goal": GOAL, "within": within, "overrides": overrides, "rows": found}
    keep("phases", figures, **({"folder": options.keep} if options.keep else {}))


if __name__ == "__main__":
    main()
