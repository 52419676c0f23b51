"""Ways to share a video among ranks: how fast, how much is sent, how long a video fits.

    python benchmarks/sequence_parallel.py --out FOLDER [--diffusion] [--ranks 2] [--smoke] [override ...]
    python benchmarks/sequence_parallel.py --out FOLDER --kernels [override ...]
    python benchmarks/sequence_parallel.py --out FOLDER --longest [--budget-gib 0.5] [override ...]
    python benchmarks/sequence_parallel.py --out FOLDER --largest [--budget-gib 0.5] [override ...]

The first measures every method in paired blocks against `sequence_parallel=dsp` and says whether
any is faster. Ranks that share cores (more than two on two cores) prove bytes and memory, not
speed; with several GPUs the same command measures both. `--kernels` needs one device: attention
kernels and linear attention against the length of the sequence. The others find the longest video of each
method and the largest model of each sharding within a memory budget: `+sweep=longest_sequence` and
`+sweep=largest_model`, where out of memory is an answer.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
from kept import keep

SEARCHES = {"longest": "longest_sequence", "largest": "largest_model"}
COLUMNS = [
    "sequence_parallel", "status", "images_per_second", "speedup", "speedup_low", "speedup_high",
    "activation_bytes_per_step", "gradient_bytes_per_step", "peak_allocated_gib", "peak_rss_gib",
]  # fmt: skip


def main() -> None:
    """Run the chosen measurement and keep its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--budget-gib", type=float)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--kernels", action="store_true")
    kind.add_argument("--diffusion", action="store_true")
    for name, sweep in SEARCHES.items():
        kind.add_argument(f"--{name}", dest="search", action="store_const", const=sweep)
    options, overrides = parser.parse_known_args()
    overrides += [f"sweep.folder={options.out}"]
    if options.ranks:
        overrides += [f"resources.ranks_per_node={options.ranks}"]
    if options.budget_gib:
        overrides += [f"resources.memory_gib_per_rank={options.budget_gib}"]
    if options.search:
        table = searched(options.search, options.out, overrides)
    elif options.kernels:
        table = by_length(options.out, overrides)
    else:
        sweep = "dsp_video_diffusion" if options.diffusion else "dsp_end_to_end"
        table = compared(sweep, options.out, [*overrides, *smoke_settings(options.smoke)])
    print(table.to_string(index=False))
    methods = "diffusion_methods" if options.diffusion else "methods"
    what = options.search or ("kernels" if options.kernels else methods)
    table.to_csv(options.out / f"{what}.csv", index=False)
    rows = json.loads(table.to_json(orient="records"))
    typed = [word for word in overrides if not word.startswith("sweep.folder=")]
    keep(f"sequence_{what}", {"rows": rows, "overrides": typed}, options.out)


def smoke_settings(smoke: bool) -> list[str]:
    """Few steps, where the script is only to be tried."""
    return ["measurement=smoke", "batch.resolution_px=16"] if smoke else []


def compared(sweep: str, folder: Path, overrides: list[str]) -> pd.DataFrame:
    """Measure every method of a named sweep in blocks with dsp; a speedup is over dsp."""
    run(["-m", f"+sweep={sweep}", "sweep.baseline={sequence_parallel:dsp}", *overrides])
    cells = pd.read_parquet(folder / sweep / "cells.parquet")
    faster = cells[(cells["speedup_low"] > 1) & (cells["sequence_parallel"] != "none")]
    names = ", ".join(faster["sequence_parallel"]) or "none"
    print(f"Methods shown to be faster than dsp: {names}.")
    return cells[[column for column in COLUMNS if column in cells]]


def by_length(folder: Path, overrides: list[str]) -> pd.DataFrame:
    """Measure the attention kernels of one device at several lengths."""
    run(["-m", "+sweep=attention_lengths", *overrides])
    cells = pd.read_parquet(folder / "attention_lengths" / "cells.parquet")
    columns = ["attention", "num_tokens", "status", "tokens_per_second", "peak_allocated_gib"]
    return cells.reindex(columns=columns).sort_values(["num_tokens", "attention"])


def searched(sweep: str, folder: Path, overrides: list[str]) -> pd.DataFrame:
    """Let a named sweep find its limits; its cells keep the record of every value tried."""
    run(["-m", f"+sweep={sweep}", *overrides])
    return pd.read_csv(folder / sweep / "report" / "limits.csv")


def run(arguments: list[str]) -> None:
    """Run vitsweep; a cell that did not end as measured is in its table."""
    command = [sys.executable, "-m", "vitsweep", *arguments]
    finished = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if finished.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}\n{finished.stdout}{finished.stderr}")


if __name__ == "__main__":
    main()
