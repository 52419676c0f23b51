"""Traces of many cells, from the cache or from processes that have torch (none is loaded here)."""

import gzip
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vitsweep.control_group import allowed_cores
from vitsweep.execution.code_hash import Known, code_of, package_hash
from vitsweep.execution.process import end_with_launcher, main_module_left_alone
from vitsweep.execution.rank_processes import fork_server, start_fork_server
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.extras.predict.timed_operators import torch_here
from vitsweep.files import cache_folder, write_cache_file
from vitsweep.spec.cell_spec import CellSpec, identity

# Traces kept on disk between commands (no torch).


NOT_TRACED = ("seed", "data", "measurement", "recipe")
"""Parts of a cell that change nothing in its step."""
VALUES = ("learning_rate", "weight_decay", "beta1", "beta2", "eps", "momentum")
"""Fields of an optimizer by which no operator differs."""


def traces_folder() -> Path:
    """Return the folder of the traces; it need not exist."""
    return cache_folder() / "traces"


class TraceCache:
    """One compressed JSON file for each distinct shape of a step.

    Safe under concurrent use. A damaged file counts as missing and is replaced. Without a folder that
    can be written nothing is kept.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or traces_folder()
        self._known: Known = {}

    def key(self, cell: CellSpec) -> str:
        """Hash what a trace depends on: shapes and choices of the cell, its code, torch."""
        shape: dict[str, Any] = {
            part: value for part, value in identity(cell).items() if part not in NOT_TRACED
        }
        shape["optimizer"] = {
            name: value for name, value in shape["optimizer"].items() if name not in VALUES
        }
        resources = cell.resources
        shape["resources"] = [resources.device, resources.nodes, resources.ranks_per_node]
        shape["task"] = cell.task.label_smoothing > 0
        shape["code"] = [code_of(cell, self._known).hash, _own_code(), torch_here()]
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:24]

    def get(self, key: str) -> StepTrace | None:
        """Return a trace, or None where there is none that can be read."""
        try:
            tree = json.loads(gzip.decompress(self._path(key).read_bytes()))
            return StepTrace.from_json(tree)
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError):
            return None  # missing or damaged

    def put(self, key: str, trace: StepTrace) -> None:
        """Keep a trace."""
        write_cache_file(
            self._path(key), gzip.compress(json.dumps(trace.to_json()).encode(), mtime=0)
        )

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json.gz"


@cache
def _own_code() -> str:
    return package_hash("extras/predict")


NICENESS = 5
"""Tracing gives way to whatever else the machine does."""


def trace_cells(
    cells: Mapping[str, CellSpec],
    cache: TraceCache | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    only_cached: bool = False,
    seconds: float | None = None,
) -> dict[str, StepTrace | str]:
    """Return name -> trace of a cell, or the reason why it cannot be traced.

    Cells of equal shape are traced once, several at a time.

    Args:
        cells: name -> cell.
        cache: of earlier traces.
        progress: called with how many of the missing traces are done, and how many there are.
        only_cached: trace nothing; cells without a trace are left out.
        seconds: after which no trace begins; cells that are not traced then are left out.
    """
    cache = cache or TraceCache()
    keys = {name: cache.key(cell) for name, cell in cells.items()}
    found: dict[str, StepTrace | str] = {}
    missing: dict[str, CellSpec] = {}
    for name, key in keys.items():
        if key in found or key in missing:
            continue
        if trace := cache.get(key):
            found[key] = trace
        else:
            missing[key] = cells[name]
    if missing and not only_cached:
        found |= _trace_missing(missing, cache, progress, seconds)
    return {name: found[key] for name, key in keys.items() if key in found}


def _trace_missing(
    missing: Mapping[str, CellSpec],
    cache: TraceCache,
    progress: Callable[[int, int], None],
    seconds: float | None,
) -> dict[str, StepTrace | str]:
    context = fork_server()
    start_fork_server()

    def start() -> Any:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,))
        with main_module_left_alone():
            process.start()
        processes.append(process)
        theirs.close()  # else the end of the process is not seen
        return ours

    found: dict[str, StepTrace | str] = {}
    progress(0, len(missing))
    until = inf if seconds is None else time.monotonic() + seconds
    left, at_work = list(missing.items())[::-1], dict[Any, str]()
    most, processes, idle = allowed_cores(), list[BaseProcess](), list[Any]()
    try:
        while True:
            while left and len(at_work) < most and time.monotonic() < until:
                connection, (key, cell) = idle.pop() if idle else start(), left.pop()
                at_work[connection] = key
                with suppress(OSError):  # its process has ended, as `recv` tells
                    connection.send(cell)
            if not at_work:
                break
            ready: list[Any] = wait(at_work)
            for connection in ready:
                key = at_work.pop(connection)
                result: StepTrace | str = "the process that traced it ended"
                with suppress(EOFError, OSError):
                    result = connection.recv()
                    idle.append(connection)
                if isinstance(result, StepTrace):
                    cache.put(key, result)
                found[key] = result
                progress(len(found), len(missing))
    finally:
        # A process with torch takes a second to end of itself, and there is nothing to wait for.
        for process in processes:
            process.kill()
            process.join()
    return found


def _serve(connection: Connection) -> None:
    """Trace in a process of its own, which ends with the process that asked for traces."""
    import warnings

    import torch

    end_with_launcher()
    os.nice(NICENESS)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with suppress(EOFError, OSError):  # the other side has ended
        while True:
            connection.send(_trace(connection.recv()))


def _trace(cell: CellSpec) -> StepTrace | str:
    """Trace a cell in a process of the pool; return the trace, or the reason why there is none."""
    from vitsweep.extras.predict.trace import trace_cell

    try:
        return trace_cell(cell)
    except Exception as error:  # whatever the model raises: the cell has no prediction
        text = str(error).strip().split("\n")[0][:200]
        return f"it cannot be traced without its device ({type(error).__name__}: {text})"
