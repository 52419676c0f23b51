#!/usr/bin/env python3
"""What it costs to keep a record through a power cut: milliseconds, beside a bare fsync.

    python benchmarks/durable_records.py --folder DIR      # of the file system in question

A file of as many bytes is written and synced, and a record published, in turns. The result goes to
benchmarks/results/ with the machine and the date.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from kept import keep

from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store


def record(number: int) -> RunRecord:
    """Return a record of 6 KiB, as most are."""
    return RunRecord(
        run_id=f"b{number}", sweep="s", cell_id="a", block=f"b{number}", position=0, attempt=1,
        status=Status.measured, spec={"note": "x" * 6000},
    )  # fmt: skip


def synced(path: Path, text: str) -> None:
    """Write a file and wait for the disk."""
    with path.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def milliseconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the file system in question")
    parser.add_argument("--records", type=int, default=200)
    typed = parser.parse_args()
    taken: dict[str, list[float]] = {"bare_fsync_ms": [], "record_ms": []}
    with tempfile.TemporaryDirectory(dir=typed.folder) as folder:
        store = Store(Path(folder, "s")).create()
        for number in range(typed.records + 1):
            run = record(number)
            bare = milliseconds(lambda: synced(Path(folder, f"{number}"), run.to_json()))  # noqa: B023
            own = milliseconds(lambda: store.publish(run))  # noqa: B023
            if number:  # the first one waits for its cell, too
                taken["bare_fsync_ms"].append(bare)
                taken["record_ms"].append(own)
    figures = {name: round(median(times), 2) for name, times in taken.items()}
    print(figures)
    keep("durable_records", {"records": typed.records, **figures})


if __name__ == "__main__":
    main()
