"""What one GPU can tell in nine minutes: does the product run, how fast, beside whom, and where time goes.

    python benchmarks/gpu.py --out FOLDER [--minutes 9] [--parts peers,soak] [--dry] [--smoke]

Needs no installation: on a machine with torch, timm, torchvision, transformers, pandas, pyarrow, rich,
scipy and matplotlib, `benchmarks/gpu_wheels.sh FOLDER` (elsewhere, beforehand) makes the folder of what
is missing, and `PYTHONPATH=CHECKOUT:FOLDER` does the rest.

The parts run in this order, each in a process of its own with its share of the time: a machine that is
taken away early leaves the most wanted results. `--parts` runs others: `smoke,prediction`, and `models`; and
named sweeps as a visitor types them, each line of their logs with its seconds in front:
`--parts speedups --minutes 9`, then `--parts first,windows,one_rank --minutes 8.2`.
FOLDER holds three files, renewed while a part runs and after it: `report.md`, `figures.json` (part ->
figures) and `records.tar.gz` (logs, the product's sweep with its records and traces). All
parts are forked from one process that has imported torch and never used a GPU. `--dry` lists what each
would run, with its planned seconds; `--smoke` runs them on a CPU with tiny shapes.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from gpu_list import COMMANDS, DEVICE_LOST, FIRST, LATEST_START, NO_DEVICE, PARTS, Part, run_part  # noqa: E402
from gpu_report import report  # noqa: E402

from vitsweep.execution.process import main_module_left_alone  # noqa: E402

PLANNED_MINUTES = 9.0
MOST_STARTS = 4
"""Of a part that such faults end: it goes on after what failed, as long as its time lasts."""
START_S = 5.0
"""Seconds below which a part is not started again: CUDA begins in them."""
RENEW_S = 15.0
"""Seconds after which results of a part that still runs are kept, too."""
KEPT = ("report.md", "figures.json", "records.tar.gz")
"""Files of results."""
PACKAGES = ("torch", "triton", "torchao", "timm", "torchvision", "transformers")


def main() -> None:
    """Run the parts; exit with 1 if one of them left no figures, with 2 if there is no GPU."""
    arguments = parsed()
    parts = arguments.parts
    scale = 60 * arguments.minutes / sum(part.seconds for part in parts)
    for part in parts:
        lines = part.plan(scale)
        print("\n".join(lines if arguments.dry else lines[:1]), flush=True)
    if arguments.dry:
        return
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # `timeout` sends it: parts end with this
    end = time.monotonic() + (float("inf") if arguments.smoke else 60 * arguments.minutes)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:  # nothing of an earlier run may pass for this one's
        (out / name).unlink(missing_ok=True)
    facts = machine(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        begin_imports(work)
        for index, part in enumerate(parts):
            # What earlier parts left of their time goes to the later ones.
            left = max(0.0, end - time.monotonic())
            share = part.seconds / sum(each.seconds for each in parts[index:])
            kept = partial(keep, work, out, facts, parts)
            run(
                part,
                left * share,
                work,
                arguments,
                partial(kept, records=part.name in ("product", *COMMANDS)),
            )
            kept()
        missing = [part.name for part in parts if not figures(work, part).exists()]
    print(f"-> {out}" + (f"; without figures: {', '.join(missing)}" if missing else ""))
    sys.exit(1 if missing else 0)


def keep(
    work: Path, out: Path, facts: dict[str, Any], parts: Sequence[Part], *, records: bool = True
) -> None:
    """Renew the files of results, the archive if `records` is true; each is whole at any moment."""
    found = {
        p.name: json.loads(figures(work, p).read_text()) for p in parts if figures(work, p).exists()
    }
    kept = {"environment": facts, **found}
    drafts = [out / f".{name}" for name in KEPT[: 2 + records]]
    drafts[0].write_text(report(facts, found, parts))
    drafts[1].write_text(json.dumps(kept, indent=1) + "\n")
    if records:
        with tarfile.open(drafts[2], "w:gz") as tar:
            for path in (*work.glob("*.log"), *work.glob("results"), *work.glob("config")):
                tar.add(path, path.name)
    for draft in drafts:
        draft.replace(out / draft.name.removeprefix("."))


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=lambda p: Path(p).resolve(), default=ROOT / "benchmarks" / "results" / "gpu"
    )
    parser.add_argument("--minutes", type=float, default=PLANNED_MINUTES)
    parser.add_argument("--parts", type=chosen, default=chosen(",".join(FIRST)), metavar="A,B")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--dry", action="store_true", help="only list the parts")
    return parser.parse_args()


def chosen(names: str) -> list[Part]:
    """Return the parts of these names, in their own order.

    Raises:
        argparse.ArgumentTypeError: there is none of a name.
    """
    wanted = names.split(",")
    if unknown := set(wanted) - {part.name for part in PARTS}:
        known = ", ".join(part.name for part in PARTS)
        raise argparse.ArgumentTypeError(f"no part {', '.join(sorted(unknown))}: there are {known}")
    return [part for part in PARTS if part.name in wanted]


def figures(work: Path, part: Part) -> Path:
    """Return where a part writes what it found."""
    return work / f"{part.name}.json"


def log_of(work: Path, part: Part) -> Path:
    """Return where a part's process prints."""
    return work / f"{part.name}.log"


def begin_imports(work: Path) -> None:
    """Start the process that parts are forked from."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    os.environ["XDG_CONFIG_HOME"] = str(work / "config")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["gpu_parts"])
    forkserver.ensure_running()


def run(
    part: Part,
    seconds: float,
    work: Path,
    arguments: argparse.Namespace,
    renew: Callable[[], None],
) -> None:
    """Let one part work for its seconds, and say how it ended; `renew` keeps what it has meanwhile.

    Raises:
        SystemExit: torch sees no GPU.
    """
    begin = time.monotonic()
    end, latest = begin + seconds, begin + LATEST_START * seconds
    device = "cpu" if arguments.smoke else "cuda"
    for _ in range(MOST_STARTS):
        code = ended((part.name, str(work), device, latest), end, renew)
        if code == NO_DEVICE:
            print(log_of(work, part).read_text().strip().splitlines()[-1])
            sys.exit(2)
        crashed = code is not None and (code == DEVICE_LOST or code < 0)
        if not crashed or end - time.monotonic() < START_S:
            break
    result = {0: "done", None: "stopped: its time was over"}.get(
        code, f"failed with {code}, see logs"
    )
    print(f"{part.name:14} {time.monotonic() - begin:6.1f} s  {result}", flush=True)


def ended(
    arguments: tuple[str, str, str, float], end: float, renew: Callable[[], None]
) -> int | None:
    """Run a part in a process of its own; return its exit code, None if it had to be stopped."""
    process = multiprocessing.get_context("forkserver").Process(target=run_part, args=arguments)
    with main_module_left_alone():
        process.start()
    try:
        while process.is_alive() and (left := end - time.monotonic()) > 0:
            process.join(min(left, RENEW_S))
            with suppress(OSError):  # a record may change or go while it is read
                renew()
        return process.exitcode
    finally:
        end_group(process)


def end_group(process: BaseProcess) -> None:
    """End a part's process, and what it started."""
    process.kill()
    if process.pid:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()


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
