"""Authenticated connections from the agents of all nodes to the first one, and the ranks that they start.

Each side proves that it knows a key (HMAC of a random message, as `multiprocessing` does it) before the
other reads anything else from it. Messages are JSON: nothing is unpickled.
"""

import hashlib
import ipaddress
import json
import multiprocessing
import os
import random
import secrets
import select
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
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import RankEnd
from vitsweep.execution.run_request import RunRequest
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Resources

PORTS = range(20_000, 32_000)
"""Below the range from which Linux takes ports for outgoing connections."""
NUM_CANDIDATE_PORTS = 8
LOOPBACK = "127.0.0.1"


def ports(key: bytes) -> list[int]:
    """Return the ports on which the first node may listen: several, because any may be taken.

    Args:
        key: a secret; nobody else can compute the ports.
    """
    return random.Random(hashlib.sha256(b"ports" + key).digest()).sample(PORTS, NUM_CANDIDATE_PORTS)


def write_key(path: Path) -> str:
    """Write a new secret that only the user can read, with which agents authenticate; return it."""
    secret = secrets.token_hex(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, secret.encode())
    os.fsync(descriptor)
    os.close(descriptor)
    return secret


SECONDS_TO_CONNECT = 180.0
"""How long agents may take to connect; some nodes boot, or load Python from a slow disk."""
SECONDS_OF_SILENCE = 10.0
"""After so long an agent, and the first node, says what it waits for."""
SECONDS_TO_AUTHENTICATE = 5
"""A connection that is silent for so long before it has authenticated is dropped."""
REFUSED = (
    multiprocessing.AuthenticationError, AssertionError, EOFError, ValueError, LookupError, OSError
)  # fmt: skip
"""What a peer without the key, or one that is not ours at all, causes."""


class AgentListener:
    """The first node's end: accepts one connection from the agent of each node.

    It listens on the addresses by which the nodes know the first one, not on others of the machine.
    A connection is authenticated in a thread of its own, so that a silent one holds up no other.

    Args:
        names: of the nodes, by index.
        addresses: of the first node, see `connect`.
        key: with which agents authenticate.
    """

    def __init__(self, names: Sequence[str], addresses: Sequence[str], key: bytes) -> None:
        self._names, self._key = names, key
        self._agents: dict[int, tuple[dict[str, Any], Connection]] = {}
        self._admitting = threading.Lock()
        self._listening = _listen(addresses, key)
        for listening in self._listening:
            threading.Thread(target=self._accept_loop, args=(listening,), daemon=True).start()

    def accept_agents(
        self,
        timeout_s: float,
        last_words: Callable[[int, bool], str] = lambda index, is_late: "",
        waits_for: Callable[[Mapping[int, str]], None] = lambda missing: None,
    ) -> list[tuple[dict[str, Any], Connection]]:
        """Wait for the agents of all nodes; return their hello messages and connections, by node.

        Args:
            timeout_s: for all of them.
            last_words: says of a node's index, and whether time is over, why no agent came from it; "" where
                one may, or nothing is known.
            waits_for: called once after some seconds with the nodes that are missing, by index.

        Raises:
            VitsweepError: some did not connect; they are named.
        """
        begin, told = time.monotonic(), False
        while missing := {i: n for i, n in enumerate(self._names) if i not in self._agents}:
            waited_s = time.monotonic() - begin
            is_late = waited_s > timeout_s
            why = {index: last_words(index, is_late) for index in missing}
            said = [
                f"{n} ({why[i]})" if why[i] else n for i, n in missing.items() if why[i] or is_late
            ]
            if is_late:
                raise VitsweepError(
                    f"No connection from {', '.join(said)} within {timeout_s:.0f} s: the node is down, it "
                    f"cannot reach {self._names[0]}, or its key is another."
                )
            if said:
                raise VitsweepError(
                    f"The agent of {', '.join(said)} ended before it connected: check the nodes and "
                    "how their agents are started."
                )
            if not told and waited_s > SECONDS_OF_SILENCE:
                waits_for(missing)
                told = True
            time.sleep(0.1)
        return [self._agents[index] for index in range(len(self._names))]

    def close(self) -> None:
        """Listen no more; accepted connections stay."""
        for listening in self._listening:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # which wakes `accept`
            listening.close()

    def _accept_loop(self, listening: socket.socket) -> None:
        while listening.fileno() >= 0:
            with suppress(OSError):
                peer, _ = listening.accept()
                threading.Thread(target=self._admit, args=(peer,), daemon=True).start()

    def _admit(self, peer: socket.socket) -> None:
        with suppress(*REFUSED), _connection_of(peer) as connection:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = receive(connection)
            with self._admitting:
                if refused := self._refused(hello):
                    send(connection, {"refused": refused})
                else:
                    name = self._names[hello["node_index"]]
                    send(connection, {"node": name})
                    self._agents[hello["node_index"]] = hello | {"node": name}, connection

    def _refused(self, hello: Mapping[str, Any]) -> str:
        """Say why an agent is not admitted; "" where it is, as that of a machine which comes again."""
        num_nodes = len(self._names)
        if hello.get("nodes", num_nodes) != num_nodes:
            return f"it has `--nodes {num_nodes}`, and this agent `--nodes {hello['nodes']}`"
        before, connection = self._agents.get(hello["node_index"], ({}, None))
        machines = [str(each.get("machine")) for each in (before, hello)]
        if connection is None or machines[0] == machines[1] or not _is_open(connection):
            return ""
        first, this = (machine.split()[0] for machine in machines)
        return (
            f"the agent of node {before['node']} runs on {first} already, and this one on {this}: each "
            "node has an index of its own (`--index`)"
        )


def _is_open(connection: Connection) -> bool:
    """Whether the other side has not closed a connection, whatever it sent before."""
    with suppress(OSError):  # this side has
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        return not poll.poll(0)
    return False


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


def _listen(addresses: Sequence[str], key: bytes) -> list[socket.socket]:
    """Return sockets that listen on the first port that is free at all addresses of this node."""
    for port in ports(key):
        with suppress(OSError):
            return [_listening(address, port) for address in own_addresses(addresses) or [""]]
    raise VitsweepError(f"The ports {ports(key)} are all taken on {addresses[0]}.")


def own_addresses(addresses: Sequence[str]) -> list[str]:
    """Return the addresses of this node by some names, under which other nodes know it; [] without any.

    Where its name means this machine alone (127.0.1.1 in /etc/hosts), others know it by another.
    """
    found = []
    for known in addresses:
        with suppress(OSError):
            address = str(socket.getaddrinfo(known, None)[0][4][0])
            if known == address or not ipaddress.ip_address(address).is_loopback:
                _listening(address, 0).close()
                found.append(address)
    return list(dict.fromkeys(found))


def _listening(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=4096)


def connect(
    index: int,
    addresses: Sequence[str],
    read_key: Callable[[], bytes],
    timeout_s: float = SECONDS_TO_CONNECT,
    **facts: Any,
) -> tuple[Connection, str]:
    """Connect an agent to the first node; return the connection, and what the first calls this node.

    Args:
        index: of this node; the first is 0.
        addresses: to try for the first node, best first; its name need not resolve.
        read_key: returns the key, which may be written late, and anew.
        timeout_s: how long it tries.
        facts: further entries of the hello.

    Raises:
        VitsweepError: it cannot be reached, or refuses the agent.
    """
    begin, why, said = time.monotonic(), "", False
    first = " or ".join(addresses)
    while (waited_s := time.monotonic() - begin) < timeout_s:
        if not said and waited_s > SECONDS_OF_SILENCE:
            print(f"Node {index} waits for the command on {first}.{why}", flush=True)
            said = True
        try:
            key, why = read_key(), ""
        except OSError as error:
            key, why = b"", f" There is no `{error.filename}` here ({error.strerror})."
        for address, port in product(addresses, ports(key) if key else ()):
            with suppress(*REFUSED):
                peer = socket.create_connection((address, port), SECONDS_TO_AUTHENTICATE)
                peer.settimeout(None)
                with _connection_of(peer) as connection:
                    answer_challenge(connection, key)
                    deliver_challenge(connection, key)
                    send(connection, {"node_index": index, "address": address, **facts})
                    welcome = receive(connection)  # it was not dropped meanwhile
                    if why := welcome.get("refused", ""):
                        raise VitsweepError(
                            f"The command on {address} refuses node {index}: {why}."
                        )
                return connection, welcome["node"]
        time.sleep(0.2)
    raise VitsweepError(
        f"Node {index} found no command of this sweep on {first} within {timeout_s:.0f} s: none runs there, "
        f"the network keeps them apart, or the keys differ.{why}"
    )


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


# The nodes as the first one sees them through their agents, and the ranks of one run there.

HEARTBEAT_SECONDS, SECONDS_UNTIL_LOST = 10.0, 180.0
"""How often each side sends a heartbeat; after how long without one it takes the other for lost. One that
swaps, or waits for a file system, may come back before."""
KILL_TIMEOUT_SECONDS, SHORT_KILL_TIMEOUT_SECONDS = 20.0, 1.0
"""How long an agent may take to end its ranks; the second where a scheduler is about to kill the job, and
with it the agents and their ranks."""


def send_heartbeats(send: Callable[[dict[str, Any]], None]) -> None:
    """Begin a thread that sends heartbeats until the other side is gone."""

    def go_on(never: threading.Event) -> None:
        with suppress(OSError):
            while not never.wait(HEARTBEAT_SECONDS):
                send({"do": "heartbeat"})

    threading.Thread(target=go_on, args=(threading.Event(),), daemon=True).start()


@dataclass
class Node:
    """One of several nodes.

    Attributes:
        name: as the scheduler, or the user, names it.
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
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        """Send an order to its agent; a node that is gone is marked as lost."""
        try:
            with self._sending:
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
        if is_report := "do" not in message:  # no heartbeat
            self.report = message
            if why := message.get("unfit"):
                self._lose(f"it cannot begin a run ({why.rstrip('.')})")
        return is_report

    def check_heartbeat(self) -> None:
        """Mark it as lost if its agent has been silent for too long."""
        if time.monotonic() - self.received_at > SECONDS_UNTIL_LOST:
            self._lose(f"it has been silent for {SECONDS_UNTIL_LOST:.0f} s")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or f"Node {self.name} was lost: {why}."


class Nodes:
    """Nodes on which agents start ranks: a cell runs on the first `resources.nodes` of them.

    Args:
        agents: hello message and connection of each agent, by node index.
        scratch: a folder that all nodes see, for a run whose record is discarded.
        facts: columns of every record.
    """

    def __init__(
        self,
        agents: Sequence[tuple[dict[str, Any], Connection]],
        scratch: Path,
        facts: Mapping[str, Any],
    ) -> None:
        self.all = [Node(hello["node"], connection) for hello, connection in agents]
        self.scratch, self.facts = scratch, facts
        self.kill_timeout_s = KILL_TIMEOUT_SECONDS
        self._kept_port: socket.socket | None = None
        reached_at = [hello["address"] for hello, _ in agents]
        self.address = max(reached_at, key=lambda a: (a != self.all[0].name, a))
        send_heartbeats(self._send_to_all)

    def _send_to_all(self, message: dict[str, Any]) -> None:
        living = [node for node in self.all if not node.lost]
        if not living:
            raise ConnectionError("All nodes are gone.")
        for node in living:
            node.send(message)

    def start(self, request: RunRequest, cell: CellSpec) -> "RemoteRanks":
        """Let the agents start all ranks of a run."""
        return RemoteRanks(self, request, cell.resources)

    def lacks(self, cell: CellSpec) -> str:
        """Say which nodes that a cell needs are gone; "" where all are there."""
        self.receive(0)
        used = self.all[: cell.resources.nodes]
        return " ".join(node.lost.removesuffix(".") for node in used if node.lost)

    @property
    def lost(self) -> str:
        """Sentences saying which nodes are gone and why, or "" while all are there."""
        return " ".join(node.lost for node in self.all if node.lost)

    def receive(self, timeout_s: float) -> None:
        """Read messages of agents; return after the first reports, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:  # all that has arrived is read, even without time to wait
            living = [node for node in self.all if not node.lost]
            left = max(0.0, deadline - time.monotonic())
            ready = wait([node.connection for node in living], left)
            if not ready or any([n.receive() for n in living if n.connection in ready]):
                break
        for node in self.all:
            node.check_heartbeat()

    def shut_down(self) -> None:
        """Let all agents end."""
        for node in self.all:
            node.send({"do": "shut_down"})
            with suppress(OSError):
                node.connection.close()
        self._free_port()

    @contextmanager
    def rendezvous(self) -> Iterator[str]:
        """Yield an `init_method` for one run: the first node, and a port that is kept for it there.

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
        yield f"tcp://{address}:{kept.getsockname()[1]}"

    def _free_port(self) -> None:
        if self._kept_port:
            self._kept_port.close()


class RemoteRanks:
    """The started ranks of one run on the first nodes, as `execution.rank_processes.Ranks` asks for.

    Args:
        nodes: all nodes.
        request: its run id is repeated in the reports of agents, so that none about an earlier run is
            taken for this one.
        asked: nodes, and ranks of each: global ranks are numbered node by node.
    """

    def __init__(self, nodes: Nodes, request: RunRequest, asked: Resources) -> None:
        self._nodes, self._used = nodes, nodes.all[: asked.nodes]
        self._run_id, self._ranks_per_node = request.run_id, asked.ranks_per_node
        order = {"do": "run", "run": request.run_id, "request": request.plain()}
        for index, node in enumerate(self._used):
            node.send(order | {"ranks": self._ranks_of(index)})

    def wait(self, seconds: float) -> None:
        """Read reports of agents for at most `seconds`."""
        self._nodes.receive(seconds)

    @property
    def running(self) -> bool:
        """Whether a rank still runs, as far as is known."""
        return any(self._runs_on(node) for node in self._used)

    @property
    def failed(self) -> bool:
        """Whether a rank ended with another exit code than 0, or a node is gone."""
        return any(e.exit_code or e.lost for e in self.ends()) or any(n.lost for n in self._used)

    def interrupt(self) -> None:
        """Let all ranks save their training and exit."""
        for node in self._used:
            node.send({"do": "interrupt"})

    def kill(self) -> None:
        """End the run everywhere; do not wait long for a node that does not answer."""
        for node in self._used:
            if self._runs_on(node):
                node.send({"do": "kill"})
        deadline = time.monotonic() + self._nodes.kill_timeout_s
        while self.running and time.monotonic() < deadline:
            self._nodes.receive(0.2)

    def ends(self) -> list[RankEnd]:
        """Return how each rank ended, as far as agents have reported."""
        return [end for index, node in enumerate(self._used) for end in self._ends_on(index, node)]

    def _runs_on(self, node: Node) -> bool:
        return not node.lost and (node.report.get("run") != self._run_id or node.report["running"])

    def _ends_on(self, index: int, node: Node) -> list[RankEnd]:
        if node.report.get("run") == self._run_id and (not node.lost or not node.report["running"]):
            return [RankEnd(**end) for end in node.report["ends"]]
        ranks = self._ranks_of(index)
        return [RankEnd(rank=rank, exit_code=None, lost=node.lost) for rank in ranks]

    def _ranks_of(self, index: int) -> list[int]:
        return list(range(index * self._ranks_per_node, (index + 1) * self._ranks_per_node))
