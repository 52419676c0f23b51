"""Ways to share a video among ranks: how fast, how much is sent, how long a video fits.

    python benchmarks/sequence_parallel.py --out FOLDER [--ranks 2] [--smoke] [override ...]
    python benchmarks/sequence_parallel.py --out FOLDER --longest [--budget-gib 1] [override ...]

The first measures every method in paired blocks against `sequence_parallel=dsp` and says whether
any is faster. Ranks that share cores (more than two on two cores) prove bytes and memory, not
speed; with several GPUs the same command measures both. The second finds the longest video of each
method within a memory budget by bisection, out of memory being an answer.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import pandas as pd

METHODS = ("ulysses", "ring", "usp", "dsp", "megatron_sp")
COLUMNS = [
    "sequence_parallel", "status", "images_per_second", "speedup", "speedup_low", "speedup_high",
    "activation_bytes_per_step", "gradient_bytes_per_step", "peak_allocated_gib", "peak_rss_gib",
]  # fmt: skip


def main() -> None:
    """Run what was asked for and keep the table beside what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--budget-gib", type=float, default=1.0)
    arguments, overrides = parser.parse_known_args()
    overrides += [f"resources.ranks_per_node={arguments.ranks}", f"sweep.folder={arguments.out}"]
    if arguments.longest:
        table = longest(arguments.out, arguments.budget_gib, overrides)
    else:
        table = compared(arguments.out, [*overrides, *smoke_settings(arguments.smoke)])
    print(table.to_string(index=False))
    table.to_csv(arguments.out / ("longest.csv" if arguments.longest else "methods.csv"))


def smoke_settings(smoke: bool) -> list[str]:
    """Few steps, where only that it runs is asked."""
    return ["measurement=smoke", "batch.resolution_px=16"] if smoke else []


def compared(folder: Path, overrides: list[str]) -> pd.DataFrame:
    """Measure every method in blocks with dsp; a speedup is over dsp."""
    run(["-m", "+sweep=dsp_end_to_end", "sweep.baseline={sequence_parallel:dsp}", *overrides])
    cells = pd.read_parquet(folder / "dsp_end_to_end" / "cells.parquet")
    faster = cells[(cells["speedup_low"] > 1) & (cells["sequence_parallel"] != "none")]
    names = ", ".join(faster["sequence_parallel"]) or "none"
    print(f"Methods shown to be faster than dsp: {names}.")
    return cells[[column for column in COLUMNS if column in cells]]


def longest(folder: Path, budget_gib: float, overrides: list[str]) -> pd.DataFrame:
    """Find the most frames that each method trains within the budget, to about 6 %."""
    rows = []
    for method in METHODS:
        fits, too_long, tried = 0, 0, 16
        while not too_long or too_long - fits > max(1, fits // 16):
            if trains(method, tried, folder, budget_gib, overrides):
                fits = tried
            else:
                too_long = tried
            tried = 2 * fits if not too_long else (fits + too_long) // 2
            if tried == fits:
                break
        rows.append(
            {"method": method, "budget_gib": budget_gib, "frames": fits, "fails_at": too_long}
        )
    return pd.DataFrame(rows)


def trains(method: str, frames: int, folder: Path, budget_gib: float, overrides: list[str]) -> bool:
    """Whether a cell is measured; any other end than out of memory is an error."""
    name = f"longest_{method}_{frames}"
    run([
        "model=video_vit_nano", "data=synthetic_video", "data.num_distinct=1",
        f"data.num_frames={frames}", "batch.resolution_px=64", "batch.images_per_step=2",
        f"resources.memory_gib_per_rank={budget_gib}", "measurement=smoke",
        "measurement.warmup_steps=0", "measurement.measured_steps=1", "measurement.phase_steps=0",
        f"sequence_parallel={method}", "sweep.baseline=null", *overrides, f"sweep.name={name}",
    ])  # fmt: skip
    status = pd.read_parquet(folder / name / "cells.parquet")["status"].iloc[0]
    if status not in ("measured", "out_of_memory"):
        raise SystemExit(f"{method} with {frames} frames ended as {status}: see {folder / name}.")
    return bool(status == "measured")


def run(arguments: list[str]) -> None:
    """Run vitsweep; a cell that did not end as measured is in its table."""
    command = [sys.executable, "-m", "vitsweep", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}\n{finished.stdout}{finished.stderr}")


if __name__ == "__main__":
    main()
