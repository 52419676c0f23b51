"""`python -m vitsweep` as a user types it, in a folder of its own."""

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from multiprocessing.connection import arbitrary_address
from pathlib import Path
from runpy import run_path
from typing import IO, Any

import pandas as pd
from pandas import DataFrame

from tests.cells import TINY
from vitsweep.cli import VERBS
from vitsweep.execution.rank_processes import fork_server
from vitsweep.planning import freeze
from vitsweep.results.store import Store

ROOT = Path(__file__).parents[1]
QUICK = (
    *TINY,
    "measurement=smoke",
    "measurement.measured_steps=2",
    "measurement.warmup_steps=1",
    "measurement.phase_steps=1",
)
"""Cells of a second or two."""

NO_REPORT = "sweep.report=false"
"""Charts take seconds of every command, and few tests look at them."""

SWEEP = "default"
"""`sweep.name` of every command that names none, so that its results are found whatever it sweeps."""


@dataclass(frozen=True)
class Command:
    """Runs vitsweep in `folder` and reads what it left there."""

    folder: Path

    def __call__(self, *arguments: str, quick: bool = True) -> subprocess.CompletedProcess[str]:
        """Run to the end.

        Raises:
            TimeoutExpired: it took more than five minutes.
        """
        running = self.fork(*arguments, quick=quick)
        out, error = running.communicate(timeout=300)
        return subprocess.CompletedProcess(running.words, running.returncode, out, error)

    def fork(self, *arguments: str, quick: bool = True) -> "Running":
        """Start it in a process forked where torch is imported: seconds less than `start`."""
        words = self._words(*arguments, quick=quick)
        return forked(typed, words, self.folder, self._environment())

    def start(
        self,
        *arguments: str,
        quick: bool = True,
        log: Path | None = None,
        more: Mapping[str, str] | None = None,
        python: Sequence[str] = (),
    ) -> "subprocess.Popen[str]":
        """Start it as a shell does; the caller waits for its end.

        Args:
            *arguments: what is typed.
            quick: cells of a second or two.
            log: file for its output; without one it goes to pipes.
            more: environment variables beside those of this process.
            python: options of the interpreter; with `-P` it is like the installed `vitsweep`.
        """
        with ExitStack() as files:
            out = files.enter_context(log.open("w")) if log else subprocess.PIPE
            return subprocess.Popen(
                [sys.executable, *python, "-m", "vitsweep", *self._words(*arguments, quick=quick)],
                cwd=self.folder,
                env=self._environment() | dict(more or {}),
                stdout=out,
                stderr=subprocess.STDOUT if log else subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    def _words(self, *arguments: str, quick: bool) -> list[str]:
        words = [a for a in arguments if "=" not in a]
        typed = [a for a in arguments if "=" in a]
        runs_cells = not words or words[0] not in VERBS or words[0] == "plan"
        is_named = any(a.startswith(("+sweep=", "sweep.name=")) for a in typed)
        name = [f"sweep.name={SWEEP}"] if runs_cells and not is_named else []
        shown = [NO_REPORT] if runs_cells and quick else []
        keys = {_key(text) for text in typed}
        ours = [*name, *shown, *(QUICK if quick else ())]
        return [*words, *(text for text in ours if _key(text) not in keys), *typed]

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}

    @property
    def store(self) -> Store:
        return Store(self.folder / "results" / SWEEP)

    def cells(self, sweep: str = SWEEP) -> DataFrame:
        """The table, one row per cell."""
        return pd.read_parquet(self.store.root.with_name(sweep) / "cells.parquet")

    def runs(self) -> DataFrame:
        return pd.read_parquet(self.store.root / "runs.parquet")


@dataclass(frozen=True)
class Running:
    """A forked command; as `subprocess.Popen`, but for its end it is not told who holds its output."""

    words: list[str]
    process: Any
    files: list[IO[str]]

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def returncode(self) -> Any:
        return self.process.exitcode

    def poll(self) -> int | None:
        code: int | None = self.process.exitcode
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout)
        told = []
        for file in self.files:
            with file:
                file.seek(0)
                told.append(file.read())
        return told[0], told[1]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


Act = Callable[[list[str]], None]


def forked(act: Act, words: list[str], folder: Path, environment: dict[str, str]) -> Running:
    """Start what `act` does with words in a process forked where torch is imported."""
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    told = [reduction.DupFd(file.fileno()) for file in files]
    process = fork_server().Process(
        target=_front_door, args=(act, words, folder, environment, *told)
    )
    process.start()
    return Running(words, process, files)


def typed(words: list[str]) -> None:
    """Do what `python -m vitsweep` does with words."""
    _become(ROOT / "vitsweep" / "__main__.py", words)
    from vitsweep.__main__ import main

    main()


def typed_and_measured(words: list[str]) -> None:
    """Do the same, and print the peak memory in KiB, which begins with that of the tests' fork server."""
    try:
        typed(words)
    finally:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        print("KIB", max(resource.getrusage(each).ru_maxrss for each in whose))


def run_as_script(words: list[str]) -> None:
    """Do what `python` does with a script of the current folder and its arguments."""
    script, *arguments = words
    _become(Path(script), arguments)
    run_path(script, run_name="__main__")


def _become(script: Path, words: list[str]) -> None:
    sys.argv = [str(script), *words]
    freeze._TYPED = tuple(sys.argv)  # the fork server has imported it, with words of its own


def _front_door(
    act: Act, words: list[str], folder: Path, environment: dict[str, str], *told: Any
) -> None:
    """Do something with words in a session of its own."""
    gc.freeze()  # collections look at all that the fork server imported otherwise: half a second
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number, file in enumerate(told, start=1):
        os.dup2(file.detach(), number)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ.update(environment)
    fork_server_of_ranks()
    act(words)


def fork_server_of_ranks() -> None:
    """Fork the server of this process's ranks from here, where torch is imported: seconds less.

    It is what `forkserver.ensure_running` starts, which then finds it running.
    """
    fork_server()  # sets what ranks find in their environment
    state = forkserver._forkserver  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        address = arbitrary_address("AF_UNIX")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive_read, alive_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive_write)
            gc.freeze()
            warnings.filters[:] = [f for f in warnings.filters if f[0] != "error"]  # pytest's
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # pytest has its own
            try:
                forkserver.main(listener.fileno(), alive_read, [])  # returns in each rank
            except SystemExit:  # the process has ended
                os._exit(0)
        os.close(alive_read)
    state._forkserver_address = address
    state._forkserver_alive_fd = alive_write
    state._forkserver_pid = pid


def fault(name: str, rank: int = 1) -> list[str]:
    """Overrides that plant a fault into a cell."""
    return [f"sequence_parallel._target_=tests.faults.{name}", f"+sequence_parallel.rank={rank}"]
