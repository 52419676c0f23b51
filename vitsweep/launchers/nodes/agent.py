"""The process on every node that starts and watches the node's ranks, as the first node orders.

It imports no torch itself: its fork server does so once, and the ranks of every run are forked from
that.
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.code_hash import code_of
from vitsweep.execution.outcome import RankEnd
from vitsweep.execution.rank_processes import (
    LocalRanks,
    context_for,
    fork_server,
    start_fork_server,
)
from vitsweep.execution.run_request import RunRequest, read_cell
from vitsweep.execution.worker import rank_main
from vitsweep.files import make_socket_folder
from vitsweep.job_environment import NODE
from vitsweep.launchers.nodes.transport import (
    HEARTBEAT_SECONDS,
    SECONDS_UNTIL_LOST,
    connect,
    receive,
    send,
    send_heartbeats,
)
from vitsweep.results.store import Store

IGNORED_SIGNALS = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
)
"""Schedulers send their signals to every process of a job; only that on the first node acts on them."""


def ignore_signals() -> None:
    """Leave the signals of a scheduler to the process on the first node that takes them."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def run_agent(
    index: int, addresses: Sequence[str], read_key: Callable[[], bytes], **facts: Any
) -> int:
    """Follow the first node's orders until it shuts down or is gone; return the exit code.

    Args:
        index: of this node.
        addresses: of the first node; see `connect`.
        read_key: returns the key.
        facts: of this node, which the first compares with its own.
    """
    ignore_signals()
    fork_server()
    try:
        connection, name = connect(index, addresses, read_key, **facts)
        os.environ[NODE] = name  # of the ranks, whatever starts them
        start_fork_server()
        Agent(connection, name).serve()
    except VitsweepError as error:
        print(error, file=sys.stderr)
        return 1
    finally:  # no exit handler runs
        shutil.rmtree(make_socket_folder(), ignore_errors=True)
    return 0


class Agent:
    """Runs the ranks of one node, as the first node orders.

    Args:
        connection: to the first node.
        name: of this node.
    """

    def __init__(self, connection: Connection, name: str = "") -> None:
        self._connection, self._name = connection, name
        self._ranks: LocalRanks | None = None
        self._run_id, self._refused, self._num_silent = "", list[RankEnd](), 0
        self._unfit, self._sentinels = "", list[int]()
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Handle orders and report the ends of ranks until the first node shuts down or is gone."""
        send_heartbeats(self._send)  # in a thread: ranks start in this one, which may take a minute
        with suppress(EOFError, OSError):
            while self._handle_next():
                pass
        self._kill_ranks()

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock:
            send(self._connection, message)

    def _handle_next(self) -> bool:
        """Wait for an order or the end of a rank; False where the first node shuts down or is silent."""
        ready = wait([self._connection, *self._sentinels], HEARTBEAT_SECONDS)
        # waits without a word are counted: the clock runs on while this process is stopped
        self._num_silent = 0 if self._connection in ready else self._num_silent + (not ready)
        if self._num_silent * HEARTBEAT_SECONDS > SECONDS_UNTIL_LOST:
            print(f"The first node has been silent for {SECONDS_UNTIL_LOST:.0f} s.", flush=True)
            return False
        order: dict[str, Any]
        order = receive(self._connection) if self._connection in ready else {"do": "report"}
        if order["do"] == "kill":
            self._kill_ranks()
        elif order["do"] == "interrupt" and self._ranks:
            self._ranks.interrupt()
        elif order["do"] == "run":
            self._run_id, self._ranks, self._refused = order["run"], None, []
            try:
                if not self._start_ranks(order):
                    self._refuse(order, "has other code than the first node.")
            except Exception as error:  # as where it does not see the folder: another node may
                self._unfit = str(error) or type(error).__name__
                self._refuse(order, f"cannot begin this run: {self._unfit}")
        if ready and order["do"] != "heartbeat":
            self.report()
        return not self._unfit and order["do"] != "shut_down"

    def _refuse(self, order: dict[str, Any], why: str) -> None:
        lost = f"Node {self._name} {why}"
        self._refused = [RankEnd(rank=r, exit_code=None, lost=lost) for r in order["ranks"]]

    def _start_ranks(self, order: dict[str, Any]) -> bool:
        """Start the ranks of a run; False where they would run other code than the first node's."""
        request = RunRequest.from_plain(order["request"])
        store = Store(request.sweep_folder, {request.cell_id: request.digest})
        cell = read_cell(store, request.cell_id, request.of_command)
        if code_of(cell).hash != request.environment["code_hash"]:
            return False
        self._ranks = LocalRanks(
            context_for(cell),
            rank_main,
            (request,),
            order["ranks"],
            request.folder,
            cell.runtime.rank_environment,
        )
        return True

    def _kill_ranks(self) -> None:
        if self._ranks:
            self._ranks.kill()

    def report(self) -> None:
        """Send which ranks have ended, and how; the next wait is for those reported as running.

        Sentinels are taken before the ends are read: the end of a rank in between ends the next wait
        at once, and is reported then.
        """
        self._sentinels = self._ranks.sentinels if self._ranks else []
        ends = self._ranks.ends() if self._ranks else self._refused
        running = bool(self._sentinels)
        how = {"ends": [asdict(end) for end in ends], "unfit": self._unfit}
        self._send({"run": self._run_id, "running": running, **how})
