"""What Slurm starts on every node of a job: one light process that forks the node's ranks.

It imports no torch itself; its fork server does so once, and every run is forked from that. The
first node's agent is the child of the job's lead.
"""

import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.calibration import calibrate_rank
from vitsweep.execution.frozen_cell import read_cell
from vitsweep.execution.rank_processes import LocalRanks, RankEnd, context_for, fork_server
from vitsweep.execution.run_request import RunRequest
from vitsweep.execution.worker import rank_main
from vitsweep.launchers.slurm.node.job_environment import JobEnvironment
from vitsweep.launchers.slurm.node.transport import join, receive, send
from vitsweep.launchers.slurm.state.job_files import Array
from vitsweep.results.store import Store

BEAT_SECONDS = 2.0
SECONDS_TO_MEET = 180.0
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Slurm sends its signals to every process of a step; what they mean is the lead's to decide."""


def main(folder: Path) -> int:
    """Do this node's part of a job; the first node leads as well."""
    place = JobEnvironment.here(os.environ)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if place.node_index or os.fork() == 0:
        return agent(place, folder)
    from vitsweep.launchers.slurm.node.coordinator import lead

    return lead(place, Array(folder).element(place.index))


def agent(place: JobEnvironment, folder: Path) -> int:
    """Serve the lead until it leaves or is gone."""
    fork_server()
    multiprocessing.forkserver.ensure_running()
    try:
        connection = join(place, place.key(folder), SECONDS_TO_MEET)
    except VitsweepError as error:
        print(error, file=sys.stderr)
        return 1
    _Agent(connection, Store(folder.parents[1])).serve()
    return 0


class _Agent:
    def __init__(self, connection: Connection, store: Store) -> None:
        self._connection, self._store = connection, store
        self._ranks: LocalRanks | None = None
        self._run = ""
        self._awaited: list[int] = []
        self._speaking = threading.Lock()

    def serve(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()
        with suppress(EOFError, OSError):
            while self._step():
                pass
        self._end_ranks()

    def _beat(self) -> None:
        """Show that the node lives, also while ranks are being started, which may take a minute."""
        with suppress(OSError):
            while True:
                self._say({"beat": time.time()})
                time.sleep(BEAT_SECONDS)

    def _say(self, message: dict[str, Any]) -> None:
        with self._speaking:
            send(self._connection, message)

    def _step(self) -> bool:
        ready = wait([self._connection, *self._awaited])
        if self._connection in ready and not self._obey(receive(self._connection)):
            return False
        self._report()
        return True

    def _obey(self, order: dict[str, Any]) -> bool:
        if order["do"] == "leave":
            return False
        if order["do"] == "kill":
            self._end_ranks()
        elif order["do"] == "interrupt":
            if self._ranks:
                self._ranks.interrupt()
        else:
            self._start(order)
        return True

    def _start(self, order: dict[str, Any]) -> None:
        self._run = order["run"]
        cell = read_cell(self._store, order["cell_id"])
        if order["do"] == "calibrate":
            told = (cell, order["init_method"], order["answer"])
            folder = Path(order["answer"]).parent
            self._ranks = LocalRanks(fork_server(), calibrate_rank, told, order["ranks"], folder)
        else:
            request = RunRequest.from_plain(order["request"])
            self._ranks = LocalRanks(
                context_for(cell), rank_main, (request,), order["ranks"], request.folder
            )

    def _end_ranks(self) -> None:
        if self._ranks:
            self._ranks.kill()

    def _report(self) -> None:
        """Say how the ranks are, and wait for those that were said to run.

        Looked at once: the end of a rank between this word and the wait must end the wait.
        """
        self._awaited = self._ranks.sentinels if self._ranks else []
        ends = self._ranks.ends() if self._ranks else []
        running = bool(self._awaited)
        self._say({"run": self._run, "running": running, "ends": [_plain(end) for end in ends]})


def _plain(end: RankEnd) -> dict[str, Any]:
    return {"rank": end.rank, "exit_code": end.exit_code, "failure": end.failure}


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no exit handler may hold up the end of a job
