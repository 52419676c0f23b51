"""The nodes of a job, as its lead sees them through their agents."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from vitsweep.launchers.slurm.node.transport import receive, send

SILENT_SECONDS = 45.0
"""An agent tells of itself every two seconds; after this long without a word its node is lost."""
KILL_SECONDS, HURRIED_KILL_SECONDS = 20.0, 1.0
"""How long an agent may take to end its ranks; the second where Slurm is about to kill the job."""


@dataclass
class Node:
    """One node of the job.

    Attributes:
        name: as Slurm names it.
        connection: to its agent.
        lost: why it is gone, or "".
        state: what its agent last said.
        heard: when, on the monotonic clock.
    """

    name: str
    connection: Connection
    lost: str = ""
    state: dict[str, Any] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)

    def tell(self, message: dict[str, Any]) -> None:
        """Send an order; a node that is gone is marked so."""
        try:
            send(self.connection, message)
        except OSError as error:
            self._lose(f"its connection broke ({error})")

    def listen(self) -> None:
        """Read what it says."""
        try:
            said = receive(self.connection)
            self.heard = time.monotonic()
            self.state = self.state if "beat" in said else said
        except (EOFError, OSError):
            self._lose("its agent ended or the node died")

    def check(self) -> None:
        """Mark it as lost if it has been silent for too long."""
        if time.monotonic() - self.heard > SILENT_SECONDS:
            self._lose(f"it has been silent for {SILENT_SECONDS:.0f} s")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or f"Node {self.name} was lost: {why}."


class Nodes:
    """All nodes of the job.

    Args:
        greeted: greeting and connection of each agent, in the order of the nodes.
        on_wait: called whenever the lead waits; may raise to end the run.
    """

    def __init__(
        self, greeted: Sequence[tuple[dict[str, Any], Connection]], on_wait: Callable[[], None]
    ) -> None:
        self.all = [Node(greeting["node"], connection) for greeting, connection in greeted]
        self.on_wait = on_wait
        self.kill_seconds = KILL_SECONDS
        used = [greeting["address"] for greeting, _ in greeted]
        self.address = max(used, key=lambda a: (a != self.all[0].name, a))

    def shorten_kill_timeout(self) -> None:
        """Do not wait for ranks to be gone: they end with their agents, and those with the job."""
        self.kill_seconds = HURRIED_KILL_SECONDS

    @property
    def lost(self) -> str:
        """Why nodes are gone, or "" while all are there."""
        return " ".join(node.lost for node in self.all if node.lost)

    def listen(self, seconds: float) -> None:
        """Take in what agents say, for at most `seconds`."""
        by_connection = {node.connection: node for node in self.all if not node.lost}
        for ready in wait(list(by_connection), timeout=seconds):
            by_connection[ready].listen()  # type: ignore[index]
        for node in by_connection.values():
            node.check()

    def leave(self) -> None:
        """Let all agents end."""
        for node in self.all:
            node.tell({"do": "leave"})
            with suppress(OSError):
                node.connection.close()

    def meeting_point(self) -> str:
        """Return a rendezvous for one run: the first node, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{address}:{port}"
