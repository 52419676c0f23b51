"""Counts and times of the product; they are reported, never required to be equal."""

import ast
import io
import json
import os
import subprocess
import sys
import time
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tools.witness.product import LISTS, ROOT, command, environment, forked, found


def measured(work: Path, place: Path) -> None:
    """Count calls and files entered; measure seconds and lines."""
    place.mkdir(parents=True)
    forked(lambda: _counted_report(work / "results" / "sample", place), work)
    forked(lambda: _entered(place), work)
    times: dict[str, float] = {}
    env = os.environ | environment(work)
    for module in ("vitsweep", "vitsweep.cli.main", "vitsweep.__main__"):
        typed = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
        runs = [
            subprocess.run(typed, cwd=work, env=env, capture_output=True, text=True)
            for _ in range(5)
        ]
        lines = [run.stderr.splitlines()[-1] for run in runs if not run.returncode]
        times[f"import {module} ms"] = min(int(x.split("|")[1]) for x in lines) / 1e3
    seconds = json.loads((place / "report_seconds.json").read_text())
    times |= zip(("write_report s", "write_report CPU s"), seconds, strict=True)
    files = list((ROOT / "vitsweep").rglob("*.py"))
    times["code lines"] = sum(code_lines(path.read_text()) for path in files)
    times["modules"] = sum(path.name != "__init__.py" for path in files)
    write(place / "figures.json", times)


def write(path: Path, document: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _counted_report(folder: Path, place: Path) -> None:
    write_report = found(LISTS["write_report"])
    write_report(folder)  # imports, and matplotlib's fonts
    clocks = (time.perf_counter, time.process_time)
    begin = [clock() for clock in clocks]
    write_report(folder)
    seconds = [clock() - start for clock, start in zip(clocks, begin, strict=True)]
    write(place / "report_seconds.json", seconds)
    calls: Counter[str] = Counter()

    def count(code: CodeType) -> None:
        if code.co_name.isidentifier() and "/tables/" in code.co_filename:
            calls[f"{Path(code.co_filename).stem}.{code.co_qualname}"] += 1

    _profiled(count, lambda: write_report(folder))
    ordered = dict(sorted(calls.items(), key=lambda item: (-item[1], item[0])))
    write(place / "table_calls.json", ordered)


def _entered(place: Path) -> None:
    files: set[str] = set()

    def enter(code: CodeType) -> None:
        if code.co_name != "<module>" and code.co_flags & 1:  # no bodies of classes
            files.add(code.co_filename)

    try:
        _profiled(enter, command(["plan", "precision=O2", "--no-predict"]))
    except SystemExit:
        pass
    own = sorted(
        f.partition(f"{ROOT}/vitsweep/")[2] for f in files if f.startswith(f"{ROOT}/vitsweep/")
    )
    modules = sorted(m for m in sys.modules if m.startswith("vitsweep.") or m == "vitsweep")
    rooms = {
        room: any(m.startswith(f"vitsweep.{room}") for m in modules)
        for room in ("extras.predict", "extras.race")
    }
    counts = {"files entered": len(own), "modules imported": len(modules), "imports": rooms}
    write(place / "plan.json", counts | {"files": own, "modules": modules})


def _profiled(see: Callable[[CodeType], None], task: Callable[[], object]) -> None:
    """Call `see` with the code of each function that starts while a task runs."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            see(frame.f_code)

    sys.setprofile(profile)
    try:
        task()
    finally:
        sys.setprofile(None)


def code_lines(text: str) -> int:
    """Return how many lines of a source file hold code: no blanks, comments or docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and isinstance(node.body[0], ast.Expr) and ast.get_docstring(node):
                documented |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {n for t in tokens if t.string.strip() and t.type != tokenize.COMMENT
            for n in range(t.start[0], t.end[0] + 1)}  # fmt: skip
    return len(held - documented)
