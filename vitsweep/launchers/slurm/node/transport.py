"""Authenticated connections from the agents of all nodes to the coordinator on the first node.

Each side proves that it knows the job's key (HMAC of a random message, as `multiprocessing` does it)
before the other reads anything else from it. Messages are JSON: nothing is unpickled.
"""

import hashlib
import ipaddress
import json
import multiprocessing
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import RankEnd

# The rank of a process in its Slurm job.


PORTS = range(20_000, 32_000)
"""Below the range from which Linux takes ports for outgoing connections."""
NUM_CANDIDATE_PORTS = 8
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Job, restart and node of this process, as Slurm sets them.

    Attributes:
        job_id: id of this job; every job of an array has its own.
        array_id: id of the array.
        index: of the job in the array.
        restart: how often Slurm has started the job before.
        node_index: of this node in the job; 0 runs the coordinator.
        nodes: names of all nodes, by node index.
        launch_address: IP address of the node that started the step, which is the first one.
    """

    job_id: str
    array_id: str
    index: int
    restart: int
    node_index: int
    nodes: tuple[str, ...]
    launch_address: str | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "JobEnvironment":
        """Read it from the environment of a Slurm task."""
        from submitit.slurm.slurm import SlurmJobEnvironment

        job = environ["SLURM_JOB_ID"]
        return cls(
            job_id=job,
            array_id=environ.get("SLURM_ARRAY_JOB_ID", job),
            index=int(environ.get("SLURM_ARRAY_TASK_ID", 0)),
            restart=int(environ.get("SLURM_RESTART_COUNT", 0)),
            node_index=int(environ["SLURM_NODEID"]),
            nodes=tuple(SlurmJobEnvironment().hostnames),
            launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR"),
        )

    @property
    def node_name(self) -> str:
        """This node's name."""
        return self.nodes[self.node_index]

    @property
    def shown_id(self) -> str:
        """The job's id as Slurm's tools show it, such as `123_4`."""
        return f"{self.array_id}_{self.index}"

    @property
    def addresses(self) -> list[str]:
        """Addresses to try for the first node, best first; its name need not resolve.

        A job of one node does not leave the node.
        """
        known = [self.nodes[0], self.launch_address] if len(self.nodes) > 1 else [LOOPBACK]
        return list(dict.fromkeys(filter(None, known)))

    @staticmethod
    def ports(key: bytes) -> list[int]:
        """Return the ports on which the first node may listen: several, because any may be taken.

        Args:
            key: the secret of the job; nobody else can compute the ports.
        """
        return random.Random(hashlib.sha256(b"ports" + key).digest()).sample(
            PORTS, NUM_CANDIDATE_PORTS
        )

    def key(self, secret: str) -> bytes:
        """Return the key with which agents of this start of this job authenticate.

        Args:
            secret: of the job array.
        """
        return f"{secret}.{self.job_id}.{self.restart}".encode()


SECONDS_TO_CONNECT = 180.0
"""How long the nodes of a job may take to connect; some boot, or load Python from a slow disk."""
SECONDS_TO_AUTHENTICATE = 5
"""A connection that is silent for so long before it has authenticated is dropped."""
WELCOME = {"welcome": True}
REFUSED = (multiprocessing.AuthenticationError, AssertionError, EOFError, ValueError, OSError)
"""What a peer without the key, or one that is not ours at all, causes."""


class AgentListener:
    """The coordinator's end: accepts one connection from the agent of each node.

    It listens on the addresses by which the nodes know the first one, not on others of the machine.
    A connection is authenticated in a thread of its own, so that a silent one holds up no other.

    Args:
        env: of the first node.
        key: with which agents authenticate.
    """

    def __init__(self, env: JobEnvironment, key: bytes) -> None:
        self._key = key
        self._accepted: queue.Queue[tuple[dict[str, Any], Connection]] = queue.Queue()
        for listening in _listen(env, key):
            threading.Thread(target=self._accept_loop, args=(listening,), daemon=True).start()

    def accept_agents(
        self, node_names: Sequence[str], timeout_s: float
    ) -> list[tuple[dict[str, Any], Connection]]:
        """Wait for the agents of all nodes; return their hello messages and connections, by node.

        Raises:
            VitsweepError: some did not connect; they are named.
        """
        agents: dict[int, tuple[dict[str, Any], Connection]] = {}
        deadline = time.monotonic() + timeout_s
        while len(agents) < len(node_names):
            try:
                hello, connection = self._accepted.get(
                    timeout=max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                missing = ", ".join(n for i, n in enumerate(node_names) if i not in agents)
                raise VitsweepError(
                    f"No connection from {missing} within {timeout_s:.0f} s: the node is down, or it "
                    f"cannot reach {node_names[0]}."
                ) from None
            agents[hello["node_index"]] = hello, connection
        return [agents[index] for index in range(len(node_names))]

    def _accept_loop(self, listening: socket.socket) -> None:
        while True:
            with suppress(OSError):
                peer, _ = listening.accept()
                threading.Thread(target=self._admit, args=(peer,), daemon=True).start()

    def _admit(self, peer: socket.socket) -> None:
        with suppress(*REFUSED):
            with _connection_of(peer) as connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                hello = receive(connection)
                send(connection, WELCOME)
            self._accepted.put((hello, connection))


@contextmanager
def _connection_of(peer: socket.socket) -> Iterator[Connection]:
    """Take over a socket; close it after an error, or where the other side is silent within the block."""
    with peer:
        connection = Connection(os.dup(peer.fileno()))
        try:
            _limit_silence(peer, SECONDS_TO_AUTHENTICATE)
            yield connection
            _limit_silence(peer, 0)
        except BaseException:
            connection.close()
            raise


def _limit_silence(peer: socket.socket, seconds: int) -> None:
    """Let the kernel end a read that waits so long; 0 for never. It is an error of the read."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _listen(env: JobEnvironment, key: bytes) -> list[socket.socket]:
    """Return sockets that listen on the first port that is free at all addresses of this node."""
    for port in env.ports(key):
        with suppress(OSError):
            return [_listening(address, port) for address in _own_addresses(env)]
    raise VitsweepError(f"The ports {env.ports(key)} are all taken on {env.node_name}.")


def _own_addresses(env: JobEnvironment) -> list[str]:
    """Return the addresses under which the other nodes know this one; without any, it listens at all.

    Where its name means this machine alone (127.0.1.1 in /etc/hosts), others know it by another.
    """
    found = []
    for known in env.addresses:
        with suppress(OSError):
            address = str(socket.getaddrinfo(known, None)[0][4][0])
            if known == address or not ipaddress.ip_address(address).is_loopback:
                _listening(address, 0).close()
                found.append(address)
    return list(dict.fromkeys(found)) or [""]


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


def connect(env: JobEnvironment, key: bytes, timeout_s: float) -> Connection:
    """Connect an agent to the coordinator on the first node, and say which node it serves.

    Raises:
        VitsweepError: it cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for address, port in product(env.addresses, env.ports(key)):
            with suppress(*REFUSED):
                peer = socket.create_connection((address, port), SECONDS_TO_AUTHENTICATE)
                peer.settimeout(None)
                with _connection_of(peer) as connection:
                    answer_challenge(connection, key)
                    deliver_challenge(connection, key)
                    hello = {"node_index": env.node_index, "node": env.node_name}
                    send(connection, hello | {"address": address})
                    receive(connection)  # the welcome: it was not dropped meanwhile
                return connection
        time.sleep(0.2)
    raise VitsweepError(f"{env.node_name} cannot reach {' or '.join(env.addresses)}.")


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the other side is gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Return the next message.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    return message


# The nodes of a job as the coordinator sees them through their agents, and the ranks of one run there.

SECONDS_UNTIL_LOST = 180.0
"""An agent sends a heartbeat every ten seconds; after this long without one its node is lost. One that
swaps, or waits for a file system, may come back before."""
KILL_TIMEOUT_SECONDS, SHORT_KILL_TIMEOUT_SECONDS = 20.0, 1.0
"""How long an agent may take to end its ranks; the second where Slurm is about to kill the job, and
with it the agents and their ranks."""


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

    def receive(self) -> bool:
        """Read the next message of its agent; return whether it says more than that the agent lives."""
        try:
            message = receive(self.connection)
        except (EOFError, OSError):
            self._lose("its agent ended or the node died")
            return True
        self.received_at = time.monotonic()
        if is_report := "heartbeat" not in message:
            self.report = message
        return is_report

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

    @property
    def lost(self) -> str:
        """Sentences saying which nodes are gone and why, or "" while all are there."""
        return " ".join(node.lost for node in self.all if node.lost)

    def receive(self, timeout_s: float) -> None:
        """Read messages of agents; return after the first reports, or after `timeout_s`."""
        deadline, has_news = time.monotonic() + timeout_s, False
        while not has_news and (left := deadline - time.monotonic()) > 0:
            living = [node for node in self.all if not node.lost]
            ready = wait([node.connection for node in living], left)
            has_news = any([node.receive() for node in living if node.connection in ready])
        for node in self.all:
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
