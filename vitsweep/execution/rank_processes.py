"""The ranks of one run as processes of this node: started, watched, interrupted, killed."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import psutil

from vitsweep.control_group import num_oom_kills
from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import RankEnd, killed_for_memory, read_failure
from vitsweep.execution.process import main_module_left_alone
from vitsweep.files import make_socket_folder, write_atomically
from vitsweep.interpreters import like_this_one, variables
from vitsweep.spec.cell_spec import CellSpec

PRELOADED = "vitsweep.execution.preloaded"
"""Imported once by the fork server, so that ranks need not."""

EXIT_UNKNOWN = 255
"""Exit code that multiprocessing gives a process whose fork server has died; a rank may have it too."""
SERVER_KILLED = "The fork server of the ranks was killed, or a rank left with exit code 255."
SECONDS_TO_KILL = 10.0
RENDEZVOUS = "vitsweep-rendezvous-"
"""Prefix of folders in the temporary folder."""
STOP_SIGNAL = signal.SIGUSR1
"""From the supervisor to the ranks; Slurm's own signals go to the supervisor alone."""

Context = ForkServerContext | SpawnContext
Target = Callable[..., None]


class Ranks(Protocol):
    """The started ranks of a run, on this node or on several."""

    def wait(self, seconds: float) -> None:
        """Return when a rank has ended, or after `seconds`."""

    @property
    def running(self) -> bool:
        """Whether a rank still runs."""

    @property
    def failed(self) -> bool:
        """Whether a rank ended with another exit code than 0, or is lost."""

    def interrupt(self) -> None:
        """Request all ranks to save a checkpoint and to exit."""

    def kill(self) -> None:
        """Kill the ranks that still run; return when they are gone."""

    def ends(self) -> list[RankEnd]:
        """Return how each rank ended, in the order of the ranks; call it after `kill`."""


StartRanks = Callable[..., Ranks]


class LocalRanks:
    """Ranks on this node.

    Args:
        context: multiprocessing context that starts the processes.
        target: called as `target(*arguments, rank, local_rank)`.
        arguments: the same for all ranks.
        ranks: global ranks of this node, in the order of their local ranks.
        folder: where a failing rank writes `failure-<rank>.json`.
        environment: variables that new processes start with, besides those of this one.
    """

    def __init__(
        self,
        context: Context,
        target: Target,
        arguments: tuple[Any, ...],
        ranks: Sequence[int],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._ranks, self._folder = list(ranks), folder
        self._oom_kills = num_oom_kills()
        sockets = make_socket_folder()  # before the ranks, whose loaders then use it too
        self._handles: list[psutil.Process] = []  # which find ranks by pid and start time
        self._processes: list[BaseProcess] = [
            context.Process(target=target, args=(*arguments, rank, local_rank), daemon=True)
            for local_rank, rank in enumerate(ranks)
        ]
        try:
            if isinstance(context, ForkServerContext):
                start_fork_server()
            with main_module_left_alone(), variables(environment or {}), like_this_one():
                for process in self._processes:
                    process.start()
                    with suppress(psutil.NoSuchProcess):  # it has ended already
                        self._handles.append(psutil.Process(process.pid))
        except (ConnectionError, EOFError) as error:
            self.kill()
            raise VitsweepError(
                f"The processes of the ranks cannot be started: the first of them (`{sys.executable}`) died "
                f"({error}). Its own words, if it had any, stand above; the kernel kills it where memory "
                "runs out. What was measured is kept: the same command goes on."
            ) from error
        except BaseException as error:
            self.kill()
            if isinstance(error, FileNotFoundError) and not sockets.is_dir():
                raise VitsweepError(
                    f"The processes of the ranks cannot be started: `{sockets}`, in which they meet, was "
                    "removed while the command ran, as cleaners of temporary folders do. What was measured "
                    "is kept: the same command goes on; `TMPDIR=DIR` chooses another place."
                ) from error
            raise

    def wait(self, seconds: float) -> None:
        """Return when a rank has ended, or after `seconds`."""
        wait(self.sentinels, timeout=seconds)

    @property
    def sentinels(self) -> list[int]:
        """Handles of the running ranks that become ready when the rank ends."""
        return [p.sentinel for p in self._processes if p.is_alive()]

    @property
    def running(self) -> bool:
        """Whether a rank still runs."""
        return any(process.is_alive() for process in self._processes)

    @property
    def failed(self) -> bool:
        """Whether a rank ended with another exit code than 0."""
        return any(process.exitcode for process in self._processes)

    def interrupt(self) -> None:
        """Request all ranks to save a checkpoint and to exit."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, STOP_SIGNAL)

    def kill(self) -> None:
        """Kill the ranks that still run; return when they are gone."""
        for handle in self._handles:  # ranks whose fork server has died count as ended, and live
            with suppress(psutil.NoSuchProcess):
                handle.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join()
        psutil.wait_procs(self._handles, SECONDS_TO_KILL)

    def ends(self) -> list[RankEnd]:
        """Return how each rank ended."""
        found = []
        for rank, process in zip(self._ranks, self._processes, strict=True):
            code, failure = process.exitcode, read_failure(self._folder, rank)
            if code == -signal.SIGKILL and failure is None and num_oom_kills() != self._oom_kills:
                failure = killed_for_memory(rank)
            if code == EXIT_UNKNOWN and failure is None:
                found.append(RankEnd(rank=rank, exit_code=None, lost=SERVER_KILLED))
            else:
                found.append(RankEnd(rank=rank, exit_code=code, failure=failure))
        return found


def fork_server() -> ForkServerContext:
    """Return the context whose server has imported torch; every run is forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def start_fork_server() -> None:
    """Start the server unless it runs: it never gets Ctrl-C, which would interrupt its imports.

    Its resource tracker removes the semaphores of killed ranks without a warning for each.
    """
    quiet = "ignore:resource_tracker:UserWarning"
    filters = os.environ.get("PYTHONWARNINGS", "")
    if quiet not in filters:
        os.environ["PYTHONWARNINGS"] = f"{filters},{quiet}".lstrip(",")
    make_socket_folder()
    with like_this_one():
        resource_tracker.ensure_running()  # before, because its start unblocks SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with like_this_one():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def context_for(cell: CellSpec) -> Context:
    """Ranks with variables of their own start from a fresh interpreter: the fork server has begun without.

    So do those that are compared with them (`measurement.start`). All others are forked before they compile:
    the server has neither threads nor a compiler's processes.
    """
    if cell.runtime.rank_environment or cell.measurement.start == "spawned":
        return multiprocessing.get_context("spawn")
    return fork_server()


@contextmanager
def rendezvous() -> Iterator[str]:
    """Yield an `init_method` for the ranks of one run on this machine: a file, so no port can clash."""
    with tempfile.TemporaryDirectory(prefix=RENDEZVOUS, ignore_cleanup_errors=True) as folder:
        meeting = Path(folder, "rendezvous")
        write_atomically(meeting, bytes(4096))  # a full disk is no fault of the cell's
        meeting.unlink()
        yield f"file://{meeting}"


def wait_for_ranks(
    ranks: Ranks,
    seconds: float,
    grace_seconds: float,
    on_wait: Callable[[], None] = lambda: None,
) -> bool:
    """Wait until all ranks have ended, or one has failed and the grace period of the others is over.

    Args:
        ranks: the started ranks.
        seconds: time limit.
        grace_seconds: grace period after the first failure.
        on_wait: called every fifth of a second; may raise.

    Returns:
        False if the time limit was reached.
    """
    deadline, failed_at = time.monotonic() + seconds, None
    while ranks.running:
        now = time.monotonic()
        if now > deadline:
            return False
        if failed_at is None and ranks.failed:
            failed_at = now
        if failed_at is not None and now > failed_at + grace_seconds:
            return True
        on_wait()
        ranks.wait(min(0.2, max(0.01, deadline - now)))
    return True
