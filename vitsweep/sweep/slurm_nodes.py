"""The ranks of a run on all nodes of a job, as the lead sees them through the nodes' agents."""

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from vitsweep.sweep.ranks import RankEnd
from vitsweep.sweep.slurm_link import receive, send

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

    def hurry(self) -> None:
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


class NodeRanks:
    """The started ranks of one run.

    Args:
        nodes: of the job.
        run: name that agents repeat, so that words about an earlier run are not taken for this one.
        ranks_per_node: global ranks are numbered node by node.
        order: what each agent is told.
    """

    def __init__(self, nodes: Nodes, run: str, ranks_per_node: int, order: dict[str, Any]) -> None:
        self._nodes, self._run, self._per_node = nodes, run, ranks_per_node
        for index, node in enumerate(nodes.all):
            node.tell(order | {"run": run, "ranks": self._ranks_of(index)})

    def wait(self, seconds: float) -> None:
        """Take in what agents say."""
        self._nodes.listen(seconds)
        self._nodes.on_wait()

    @property
    def running(self) -> bool:
        """Whether a rank still runs, as far as anybody can say."""
        return any(self._runs_on(node) for node in self._nodes.all)

    @property
    def failed(self) -> bool:
        """Whether a rank ended otherwise than well, or a node is gone."""
        return bool(self._nodes.lost) or any(end.exit_code for end in self.ends())

    def kill(self) -> None:
        """End the run everywhere; a node that does not answer is given up."""
        for node in self._nodes.all:
            if self._runs_on(node):
                node.tell({"do": "kill"})
        deadline = time.monotonic() + self._nodes.kill_seconds
        while self.running and time.monotonic() < deadline:
            self._nodes.listen(0.2)

    def ends(self) -> list[RankEnd]:
        """How each rank ended, as far as agents have said."""
        return [
            end for index, node in enumerate(self._nodes.all) for end in self._ends_on(index, node)
        ]

    def _runs_on(self, node: Node) -> bool:
        return not node.lost and (node.state.get("run") != self._run or node.state["running"])

    def _ends_on(self, index: int, node: Node) -> list[RankEnd]:
        if node.state.get("run") == self._run and (not node.lost or not node.state["running"]):
            return [RankEnd(**end) for end in node.state["ends"]]
        ranks = self._ranks_of(index)
        return [RankEnd(rank=rank, exit_code=None, lost=node.lost) for rank in ranks]

    def _ranks_of(self, index: int) -> list[int]:
        return list(range(index * self._per_node, (index + 1) * self._per_node))
