"""What one GPU can tell in eight minutes: does everything run, how fast, beside whom, and where time goes.

    python benchmarks/gpu.py --out FOLDER [--minutes 8] [--dry] [--smoke]

Needs no installation: on a machine with torch, timm, torchvision, transformers, pandas, pyarrow, rich,
scipy and matplotlib, `benchmarks/gpu_wheels.sh FOLDER` (elsewhere, beforehand) makes the folder of what
is missing, and `PYTHONPATH=CHECKOUT:FOLDER` does the rest.

The parts run in this order, each in a process of its own with its share of the time, and write
`<part>.json` as they go: a machine that is taken away early leaves the most wanted results. The processes
of all parts are started at once, so that Python imports torch once in the time and not six times. `--dry`
lists what each would run, with its planned seconds; `--smoke` runs all of them on a CPU with tiny shapes.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from gpu_list import DEVICE_LOST, LATEST_START, NO_DEVICE, PARTS, Part  # noqa: E402
from gpu_report import report  # noqa: E402

PLANNED_MINUTES = 8.0
MOST_STARTS = 4
"""Of a part that such faults end: it goes on after what failed, as long as its time lasts."""
START_S = 15.0
"""Seconds below which a part is not started again: Python imports torch in them."""
PACKAGES = ("torch", "triton", "torchao", "timm", "torchvision", "transformers")


def main() -> None:
    """Run all parts; exit with 1 if one of them left no figures, with 2 if there is no GPU."""
    arguments = parsed()
    scale = arguments.minutes / PLANNED_MINUTES
    for part in PARTS:
        lines = part.plan(scale)
        print("\n".join(lines if arguments.dry else lines[:1]), flush=True)
    if arguments.dry:
        return
    end = time.monotonic() + (float("inf") if arguments.smoke else 60 * arguments.minutes)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:  # nothing of an earlier run may pass for this one's
        figures(out, part).unlink(missing_ok=True)
    (out / "environment.json").write_text(json.dumps(machine(arguments), indent=1) + "\n")
    with started(arguments) as processes:
        for index, part in enumerate(PARTS):
            # What earlier parts left of their time goes to the later ones.
            left = max(0.0, end - time.monotonic())
            share = part.seconds / sum(each.seconds for each in PARTS[index:])
            run(part, processes, left * share, arguments)
            (out / "report.md").write_text(report(out))
    with tarfile.open(out / "logs.tar.gz", "w:gz") as tar:
        for path in (out / "environment.json", *(log_of(out, part) for part in PARTS)):
            tar.add(path, path.name)
            path.unlink()
    missing = [part.name for part in PARTS if not figures(out, part).exists()]
    print(f"-> {out}" + (f"; without figures: {', '.join(missing)}" if missing else ""))
    sys.exit(1 if missing else 0)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=lambda p: Path(p).resolve(), default=ROOT / "benchmarks" / "results" / "gpu"
    )
    parser.add_argument("--minutes", type=float, default=PLANNED_MINUTES)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--dry", action="store_true", help="only list the parts")
    return parser.parse_args()


def figures(out: Path, part: Part) -> Path:
    """Return where a part writes what it found."""
    return out / f"{part.name}.json"


def log_of(out: Path, part: Part) -> Path:
    """Return where a part's process prints."""
    return out / f"{part.name}.log"


@contextmanager
def started(arguments: argparse.Namespace) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Yield part -> its process, which has begun to import; end those that are left."""
    for part in PARTS:
        log_of(arguments.out, part).write_text("")
    processes = {part.name: start(part, arguments) for part in PARTS}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def start(part: Part, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a part's process, which imports what it needs and waits for its deadline."""
    device = "cpu" if arguments.smoke else "cuda"
    call = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu_parts; "
        f"gpu_parts.main({part.name!r}, {str(arguments.out)!r}, {device!r})"
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log_of(arguments.out, part).open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-c", call],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def run(
    part: Part,
    processes: dict[str, subprocess.Popen[str]],
    seconds: float,
    arguments: argparse.Namespace,
) -> None:
    """Let one part work for its seconds, and say how it ended.

    Raises:
        SystemExit: torch sees no GPU.
    """
    begin = time.monotonic()
    end = begin + seconds
    for _ in range(MOST_STARTS):
        code = ended(processes[part.name], begin + LATEST_START * seconds, end)
        if code == NO_DEVICE:
            print(log_of(arguments.out, part).read_text().strip().splitlines()[-1])
            sys.exit(2)
        crashed = code is not None and (code == DEVICE_LOST or code < 0)
        if not crashed or end - time.monotonic() < START_S:
            break
        processes[part.name] = start(part, arguments)
    result = {0: "done", None: "stopped: its time was over"}.get(
        code, f"failed with {code}, see logs"
    )
    print(f"{part.name:14} {time.monotonic() - begin:6.1f} s  {result}", flush=True)


def ended(process: subprocess.Popen[str], deadline: float, end: float) -> int | None:
    """Tell a part until when it may begin something; return its exit code, None if it had to be stopped."""
    try:
        # On a CPU, where nothing is measured, there is no end.
        left = None if end == float("inf") else max(0.0, end - time.monotonic())
        process.communicate(f"{deadline}\n", timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None
    return process.returncode


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return when and where this runs, and with which packages."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit"]
    try:
        gpu = subprocess.run([*command, "--format=csv"], capture_output=True, text=True).stdout
    except OSError:
        gpu = "no nvidia-smi"
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": arguments.minutes,
        "smoke": arguments.smoke,
        "python": sys.version,
        "gpu": gpu,
        "cores": os.cpu_count(),
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
