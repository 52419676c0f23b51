"""What one GPU can tell in eight minutes: does everything run, how fast, beside whom, and where time goes.

    python benchmarks/gpu.py --out FOLDER [--minutes 8] [--dry] [--smoke]

Needs no installation: on a machine with torch, timm, torchvision, transformers, pandas, pyarrow, rich,
scipy and matplotlib, `benchmarks/gpu_wheels.sh FOLDER` (elsewhere, beforehand) makes the folder of what
is missing, and `PYTHONPATH=CHECKOUT:FOLDER` does the rest.

The parts run in this order, each in a process of its own with its share of the time, and write
`<part>.json` as they go: a machine that is taken away early leaves the most wanted results. `--dry`
lists what each would run, with its planned seconds; `--smoke` runs all of them on a CPU with tiny shapes.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from gpu_list import PARTS, START_S, Part  # noqa: E402

PLANNED_MINUTES = 8.0


def main() -> None:
    """Run all parts; exit with 1 if one of them left no figures."""
    arguments = parsed()
    scale = arguments.minutes / PLANNED_MINUTES
    for part in PARTS:
        lines = part.plan(scale)
        print("\n".join(lines if arguments.dry else lines[:1]))
    if arguments.dry:
        return
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    environment = out / "environment.json"
    environment.write_text(json.dumps(machine(arguments), indent=1) + "\n")
    logs = [environment, *(run(part, part.seconds * scale, arguments) for part in PARTS)]
    (out / "report.md").write_text(report(out))
    with tarfile.open(out / "logs.tar.gz", "w:gz") as tar:
        for log in logs:
            tar.add(log, log.name)
            log.unlink()
    missing = [part.name for part in PARTS if not (out / f"{part.name}.json").exists()]
    print(f"-> {out}" + (f"; without figures: {', '.join(missing)}" if missing else ""))
    sys.exit(1 if missing else 0)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--minutes", type=float, default=PLANNED_MINUTES)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--dry", action="store_true", help="only list the parts")
    return parser.parse_args()


def run(part: Part, seconds: float, arguments: argparse.Namespace) -> Path:
    """Run one part in a process of its own; return its log."""
    log, begin = arguments.out / f"{part.name}.log", time.monotonic()
    # A smoke test runs all of it, however slow the machine.
    limit_s = 1e9 if arguments.smoke else max(seconds - START_S, 0.2 * seconds)
    device = "cpu" if arguments.smoke else "cuda"
    call = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import gpu_parts; "
        f"from pathlib import Path; gpu_parts.run({part.name!r}, {limit_s}, "
        f"Path({str(arguments.out)!r}), small={arguments.smoke}, device={device!r})"
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as handle:
        try:
            code = subprocess.run(
                [sys.executable, "-c", call],
                cwd=ROOT,
                env=environment,
                stdout=handle,
                stderr=subprocess.STDOUT,
                # What began in time may end; on a CPU, where nothing is measured, it may take long.
                timeout=None if arguments.smoke else 1.25 * seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    ended = {0: "done", -1: "stopped: its time was over"}.get(code, f"failed with {code}, see logs")
    print(f"{part.name:14} {time.monotonic() - begin:6.1f} s  {ended}", flush=True)
    return log


def machine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return when and where this runs."""
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
    }


def report(out: Path) -> str:
    """Return the figures as Markdown tables."""
    facts = json.loads((out / "environment.json").read_text())
    lines = ["# One GPU", "", *(f"- {name}: {_text(value)}" for name, value in facts.items()), ""]
    for part in PARTS:
        path = out / f"{part.name}.json"
        lines += [f"## {part.question}", ""]
        lines += _table(json.loads(path.read_text())) if path.exists() else ["No figures.", ""]
    return "\n".join(lines)


def _table(figures: dict[str, Any]) -> list[str]:
    rows = figures.get("rows") or [
        {"name": name} | (value if isinstance(value, dict) else {"result": value})
        for group in ("steps", "causal kernel", "cells")
        for name, value in (
            figures.get(group) if isinstance(figures.get(group), dict) else {}
        ).items()
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "turns_ms"))
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    summary = [f"- {name}: {_text(value)}" for name, value in figures.get("summary", {}).items()]
    return [*head, *("| " + " | ".join(row) + " |" for row in cells), "", *summary, ""]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:200]


if __name__ == "__main__":
    main()
