"""The nodes of a job as the coordinator sees them through their agents, and the ranks of one run there."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from vitsweep.execution.outcome import RankEnd
from vitsweep.launchers.slurm.node.transport import receive, send

SECONDS_UNTIL_LOST = 45.0
"""An agent sends a heartbeat every two seconds; after this long without one its node is lost."""
KILL_TIMEOUT_SECONDS, SHORT_KILL_TIMEOUT_SECONDS = 20.0, 1.0
"""How long an agent may take to end its ranks; the second where Slurm is about to kill the job."""


@dataclass
class Node:
    """One node of the job.

    Attributes:
        name: as Slurm names it.
        connection: to its agent.
        lost: a sentence saying why it is gone, or "".
        report: the latest report of its agent: run, whether ranks are running, how ranks ended.
        received_at: when its agent last sent a message, in seconds on the monotonic clock.
    """

    name: str
    connection: Connection
    lost: str = ""
    report: dict[str, Any] = field(default_factory=dict)
    received_at: float = field(default_factory=time.monotonic)

    def send(self, message: dict[str, Any]) -> None:
        """Send an order to its agent; a node that is gone is marked as lost."""
        try:
            send(self.connection, message)
        except OSError as error:
            self._lose(f"its connection broke ({error})")

    def receive(self) -> None:
        """Read the next message of its agent."""
        try:
            message = receive(self.connection)
            self.received_at = time.monotonic()
            self.report = self.report if "heartbeat" in message else message
        except (EOFError, OSError):
            self._lose("its agent ended or the node died")

    def check_heartbeat(self) -> None:
        """Mark it as lost if its agent has been silent for too long."""
        if time.monotonic() - self.received_at > SECONDS_UNTIL_LOST:
            self._lose(f"it has been silent for {SECONDS_UNTIL_LOST:.0f} s")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or f"Node {self.name} was lost: {why}."


class Nodes:
    """All nodes of the job.

    Args:
        agents: hello message and connection of each agent, by node index.
        on_wait: called whenever the coordinator waits; may raise to end the run.
    """

    def __init__(
        self, agents: Sequence[tuple[dict[str, Any], Connection]], on_wait: Callable[[], None]
    ) -> None:
        self.all = [Node(hello["node"], connection) for hello, connection in agents]
        self.on_wait = on_wait
        self.kill_timeout_s = KILL_TIMEOUT_SECONDS
        self._kept_port: socket.socket | None = None
        reached_at = [hello["address"] for hello, _ in agents]
        self.address = max(reached_at, key=lambda a: (a != self.all[0].name, a))

    def shorten_kill_timeout(self) -> None:
        """Do not wait for ranks to be gone: they end with their agents, and those with the job."""
        self.kill_timeout_s = SHORT_KILL_TIMEOUT_SECONDS

    @property
    def lost(self) -> str:
        """Sentences saying which nodes are gone and why, or "" while all are there."""
        return " ".join(node.lost for node in self.all if node.lost)

    def receive(self, timeout_s: float) -> None:
        """Read messages of agents; return after the first ones, or after `timeout_s`."""
        by_connection = {node.connection: node for node in self.all if not node.lost}
        for ready in wait(list(by_connection), timeout=timeout_s):
            by_connection[ready].receive()  # type: ignore[index]
        for node in by_connection.values():
            node.check_heartbeat()

    def shut_down(self) -> None:
        """Let all agents end."""
        for node in self.all:
            node.send({"do": "shut_down"})
            with suppress(OSError):
                node.connection.close()
        self._free_port()

    def rendezvous(self) -> str:
        """Return an `init_method` for one run: the first node, and a port that is kept for it there.

        The port stays bound until the next run, so that no other program of the node gets it before
        rank 0 listens on it. Rank 0 may: both sockets have SO_REUSEADDR, and this one never listens.
        """
        is_ipv6 = ":" in self.address
        kept = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        self._free_port()
        self._kept_port = kept
        address = f"[{self.address}]" if is_ipv6 else self.address
        return f"tcp://{address}:{kept.getsockname()[1]}"

    def _free_port(self) -> None:
        if self._kept_port:
            self._kept_port.close()


class RemoteRanks:
    """The started ranks of one run on all nodes, as `execution.rank_processes.Ranks` asks for.

    Args:
        nodes: of the job.
        run_id: repeated in the reports of agents, so that none about an earlier run is taken for
            this one.
        ranks_per_node: global ranks are numbered node by node.
        order: sent to each agent, with the run id and the node's ranks.
    """

    def __init__(
        self, nodes: Nodes, run_id: str, ranks_per_node: int, order: dict[str, Any]
    ) -> None:
        self._nodes, self._run_id, self._ranks_per_node = nodes, run_id, ranks_per_node
        for index, node in enumerate(nodes.all):
            node.send(order | {"run": run_id, "ranks": self._ranks_of(index)})

    def wait(self, seconds: float) -> None:
        """Read reports of agents for at most `seconds`."""
        self._nodes.receive(seconds)
        self._nodes.on_wait()

    @property
    def running(self) -> bool:
        """Whether a rank still runs, as far as is known."""
        return any(self._runs_on(node) for node in self._nodes.all)

    @property
    def failed(self) -> bool:
        """Whether a rank ended with another exit code than 0, or a node is gone."""
        return bool(self._nodes.lost) or any(e.exit_code or e.lost for e in self.ends())

    def interrupt(self) -> None:
        """Let all ranks save their training and exit."""
        for node in self._nodes.all:
            node.send({"do": "interrupt"})

    def kill(self) -> None:
        """End the run everywhere; do not wait long for a node that does not answer."""
        for node in self._nodes.all:
            if self._runs_on(node):
                node.send({"do": "kill"})
        deadline = time.monotonic() + self._nodes.kill_timeout_s
        while self.running and time.monotonic() < deadline:
            self._nodes.receive(0.2)

    def ends(self) -> list[RankEnd]:
        """Return how each rank ended, as far as agents have reported."""
        return [
            end for index, node in enumerate(self._nodes.all) for end in self._ends_on(index, node)
        ]

    def _runs_on(self, node: Node) -> bool:
        return not node.lost and (node.report.get("run") != self._run_id or node.report["running"])

    def _ends_on(self, index: int, node: Node) -> list[RankEnd]:
        if node.report.get("run") == self._run_id and (not node.lost or not node.report["running"]):
            return [RankEnd(**end) for end in node.report["ends"]]
        ranks = self._ranks_of(index)
        return [RankEnd(rank=rank, exit_code=None, lost=node.lost) for rank in ranks]

    def _ranks_of(self, index: int) -> list[int]:
        return list(range(index * self._ranks_per_node, (index + 1) * self._ranks_per_node))
