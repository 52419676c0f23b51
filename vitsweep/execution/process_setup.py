"""Set-up of a process that this one starts: its main module, log, memory limit and end with the launcher."""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from vitsweep.spec.resources import Resources

MIB, GIB = 2**20, 2**30
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Parameters of mallopt(3)."""


def log_to(path: Path) -> None:
    """Send everything this process prints, C++ libraries included, to a file of its own."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)


@contextmanager
def main_module_left_alone() -> Iterator[None]:
    """Keep processes that start inside the block from running the user's script once more.

    multiprocessing lets each child import the main module of its parent, so that a script would need
    `if __name__ == "__main__":` around all that it does. Ranks and processes that trace need nothing of it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_launcher() -> None:
    """Kill this process when its launcher dies; leave Ctrl-C to the launcher.

    The parent of a forked rank is the fork server, which lives as long as any rank does, so the
    launcher itself is watched.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        threading.Thread(target=_kill_after, args=(launcher,), daemon=True).start()


def _kill_after(launcher: Any) -> None:
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def exit_now(code: int) -> None:
    """Exit without running exit handlers, which would wait for threads that no longer matter."""
    with suppress(OSError):  # the log may be on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def limit_memory(resources: Resources) -> None:
    """Let allocations on a CPU fail beyond `resources.memory_gib_per_rank` of what is in use now."""
    if resources.memory_gib_per_rank is None or resources.device != "cpu":
        return
    _return_freed_memory()
    in_use = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])
        * resource.getpagesize()
    )
    limit = in_use + int(resources.memory_gib_per_rank * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _return_freed_memory() -> None:
    """Let glibc return large freed blocks to the system, whichever thread allocated them.

    Otherwise fragmentation uses up the limit: gloo's threads would each keep an arena of their own,
    and a freed gradient bucket would stay mapped between live tensors.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, MIB)
