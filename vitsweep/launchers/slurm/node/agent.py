"""The process that Slurm starts on every node of a job; it starts and watches the node's ranks.

It imports no torch itself: its fork server does so once, and the ranks of every run are forked from
that. On the first node the same command is also the job's coordinator, with the agent as its child.
"""

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.rank_processes import (
    LocalRanks,
    context_for,
    fork_server,
    start_fork_server,
)
from vitsweep.execution.run_request import RunRequest, read_cell
from vitsweep.execution.worker import rank_main
from vitsweep.files import make_socket_folder
from vitsweep.launchers.slurm.node.coordinator import NOT_STARTED, coordinate, refuse
from vitsweep.launchers.slurm.node.transport import (
    SECONDS_TO_CONNECT,
    JobEnvironment,
    connect,
    receive,
    send,
)
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray
from vitsweep.results.store import Store

HEARTBEAT_SECONDS = 10.0
IGNORED_SIGNALS = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
)
"""Slurm sends its signals to every process of a step; only the coordinator acts on them."""


def main(folder: Path, digest: str) -> int:
    """Do this node's part of a job of the array in `folder`; return the exit code.

    Args:
        folder: of the array.
        digest: of its work, as it was submitted.
    """
    env = JobEnvironment.from_environ(os.environ)
    array = JobArray(folder)
    try:
        work = array.work(digest)
    except VitsweepError as error:
        print(error, file=sys.stderr)
        if not env.node_index:
            refuse(env, array, str(error))
        return NOT_STARTED
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    job, key = array.job(env.index, work), env.key(work.secret)
    if env.node_index or os.fork() == 0:
        return run_agent(env, job, key)
    return coordinate(env, job, key)


def run_agent(env: JobEnvironment, job: ArrayJob, key: bytes) -> int:
    """Follow the coordinator's orders until it shuts down or is gone; return the exit code."""
    fork_server()
    try:
        start_fork_server()
        connection = connect(env, key, SECONDS_TO_CONNECT)
        Agent(connection, job.store()).serve()
    except VitsweepError as error:
        print(error, file=sys.stderr)
        return 1
    finally:  # no exit handler runs
        shutil.rmtree(make_socket_folder(), ignore_errors=True)
    return 0


class Agent:
    """Runs the ranks of one node, as the coordinator orders.

    Args:
        connection: to the coordinator.
        store: of the sweep.
    """

    def __init__(self, connection: Connection, store: Store) -> None:
        self._connection, self._store = connection, store
        self._ranks: LocalRanks | None = None
        self._run_id = ""
        self._sentinels: list[int] = []
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Handle orders and report the ends of ranks until the coordinator shuts down or is gone."""
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        with suppress(EOFError, OSError):
            while self._handle_next():
                pass
        self._kill_ranks()

    def _send_heartbeats(self) -> None:
        """In a thread: ranks are started in the main one, which may take a minute."""
        with suppress(OSError):
            while True:
                self._send({"heartbeat": time.time()})
                time.sleep(HEARTBEAT_SECONDS)

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            send(self._connection, message)

    def _handle_next(self) -> bool:
        """Wait for an order or the end of a rank; False where the coordinator shuts down."""
        ready = wait([self._connection, *self._sentinels])
        if self._connection in ready and not self._handle_order(receive(self._connection)):
            return False
        self.report()
        return True

    def _handle_order(self, order: dict[str, Any]) -> bool:
        if order["do"] == "shut_down":
            return False
        if order["do"] == "kill":
            self._kill_ranks()
        elif order["do"] == "interrupt":
            if self._ranks:
                self._ranks.interrupt()
        else:
            self._start_ranks(order)
        return True

    def _start_ranks(self, order: dict[str, Any]) -> None:
        self._run_id = order["run"]
        request = RunRequest.from_plain(order["request"])
        cell = read_cell(self._store, request.cell_id, request.of_command)
        self._ranks = LocalRanks(
            context_for(cell),
            rank_main,
            (request,),
            order["ranks"],
            request.folder,
            cell.runtime.rank_environment,
        )

    def _kill_ranks(self) -> None:
        if self._ranks:
            self._ranks.kill()

    def report(self) -> None:
        """Send which ranks have ended, and how; the next wait is for those reported as running.

        Sentinels are taken before the ends are read: the end of a rank in between ends the next wait
        at once, and is reported then.
        """
        self._sentinels = self._ranks.sentinels if self._ranks else []
        ends = self._ranks.ends() if self._ranks else []
        running = bool(self._sentinels)
        self._send({"run": self._run_id, "running": running, "ends": [asdict(e) for e in ends]})


if __name__ == "__main__":
    array, digest, place, own = [*sys.argv[1:], "", "", ""][:4]
    if own:  # where the command had it, but that the code of the jobs, on PYTHONPATH, comes before
        sys.path.insert(1 if place == "first" else len(sys.path), own)
    code = main(Path(array), digest)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no exit handler may hold up the end of a job
