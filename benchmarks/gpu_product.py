"""The parts of `gpu.py` that run vitsweep's own commands, and the soak of its fastest cell."""

import csv
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_list import BASE, PARTS, PRODUCT, PRODUCT_SMOKE, STACK
from gpu_steps import Figures, Run, cell_of, largest_batch, our_step, reason_of

from vitsweep.measure.environment import DeviceMonitor
from vitsweep.measure.utilization import throughput
from vitsweep.model.precision import set_process_flags
from vitsweep.training.timed_steps import StepClock

GRACE_S = 10.0
"""After Ctrl-C, in which a command keeps what it has measured."""
COLUMNS = ("status", "images_per_second", "speedup", "step_time_ms", "peak_gib", "mfu",
           "compile_seconds", "reason")  # fmt: skip
"""What the report shows of `cells.csv`; the archive has all of it."""
SOAK_STEPS = 20
"""Steps of which a row of the soak is made."""


def product(run: Run) -> None:
    """Run a small sweep as a user would: processes, proof, monitors, memory step, trace, record.

    It is stopped as by Ctrl-C where its time is over; what was measured by then is shown.
    """
    settings = PRODUCT_SMOKE if run.size.seconds == 0 else PRODUCT
    code = _vitsweep(run, "-m", "sweep.name=product", *settings)
    _vitsweep(run, "collect", "product", until=time.monotonic() + 60)
    run.write({"exit code": code, "rows": _rows(run.path.parent / "results" / "product")})


def commands(run: Run) -> None:
    """Run the commands of a part in their order; where there is no GPU, only plan them for one."""
    [part] = [each for each in PARTS if each.name == run.path.stem]
    codes = {}
    for item in part.items:
        words = shlex.split(item)
        if run.size.seconds == 0:
            words = ["plan", *words, "--hardware", "h200", "--no-predict"]
        if not run.is_late:
            codes[item] = _vitsweep(run, *words)
        rows = [
            {"sweep": path.name} | row
            for path in sorted(run.path.parent.glob("results/*"))
            for row in _rows(path)
        ]
        run.write({"exit codes": codes, "rows": rows})


def soak(run: Run) -> None:
    """Train the best stack without a pause: does its rate hold once the GPU is warm?"""
    images = run.figures_of("peers").get("images") or largest_batch(run.size, *BASE)
    device = torch.device(run.size.device)
    rows: list[Figures] = []
    try:
        cell = cell_of(run.size, *(() if run.size.seconds == 0 else STACK), images=images)
        set_process_flags(cell)
        step, began = our_step(cell), time.monotonic()
        while not run.is_late and not (run.size.seconds == 0 and rows):
            monitor, since = DeviceMonitor(device), time.perf_counter()
            clock = StepClock(device)
            clock.mark()
            for _ in range(SOAK_STEPS):
                step()
                clock.mark()
            mean_ms = sum(clock.times_ms()) / SOAK_STEPS
            state = monitor.end(since)
            rows.append({
                "second": round(time.monotonic() - began, 1),
                "step_ms": mean_ms,
                "images_per_second": images / mean_ms * 1e3,
                "tflops": throughput(cell, mean_ms)["model_tflops_per_rank"],
                "sm_clock_mhz": state.sm_clock_mhz,
                "power_capped_share": state.power_capped_share,
                "temperature_c": _temperature_c(device),
                "throttled": state.throttled,
            })  # fmt: skip
            run.write({"images": images, "rows": rows})
    except (Exception, SystemExit) as error:  # what the device cannot do is the result
        run.write({"images": images, "rows": [*rows, {"reason": reason_of(error)}]})


def _temperature_c(device: torch.device) -> int | None:
    try:
        return torch.cuda.temperature(device) if device.type == "cuda" else None
    except Exception:  # only a column
        return None


def _vitsweep(run: Run, *arguments: str, until: float | None = None) -> int | None:
    """Run a command of vitsweep in the part's folder; return its exit code, None if it was killed.

    Each line of the log begins with the seconds since the command was started.
    """
    command: Sequence[str] = (sys.executable, "-m", "vitsweep", *arguments)
    print("$", " ".join(command[1:]), flush=True)
    # What a shell starts in the background ignores SIGINT, and so would this.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, cwd=run.path.parent, preexec_fn=heed, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    reader = threading.Thread(target=_stamp, args=(process.stdout,), daemon=True)
    reader.start()
    end = run.deadline if until is None else min(run.deadline, until)
    for call in (None, signal.SIGINT, signal.SIGINT):
        if call:
            process.send_signal(call)
        left = GRACE_S if call else max(0.0, end - time.monotonic())
        try:
            code = process.wait(None if left == float("inf") else left)
        except subprocess.TimeoutExpired:
            continue
        reader.join(GRACE_S)
        return code
    process.kill()
    process.wait()
    return None


def _stamp(lines: Iterable[str]) -> None:
    began = time.monotonic()
    for line in lines:
        print(f"{time.monotonic() - began:6.1f} {line}", end="", flush=True)


def _rows(sweep: Path) -> list[dict[str, Any]]:
    try:
        with (sweep / "cells.csv").open(encoding="utf-8", newline="") as file:
            found = [*csv.DictReader(file)]
    except OSError as error:
        return [{"reason": f"no table: {error}"}]
    return [
        {"name": row.get("cell", "")}
        | {column: _value(row[column]) for column in COLUMNS if row.get(column)}
        for row in found
    ]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
