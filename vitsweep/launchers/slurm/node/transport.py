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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.files import read_text

# The place of a process in its Slurm job.


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

    def key(self, folder: Path) -> bytes:
        """Return the secret with which agents of this start of this job authenticate.

        Args:
            folder: of the job array.
        """
        secret = read_text(folder / "key")
        return f"{secret}.{self.job_id}.{self.restart}".encode()


SECONDS_TO_CONNECT = 180.0
"""How long the nodes of a job may take to connect; some boot, or load Python from a slow disk."""
SECONDS_TO_AUTHENTICATE = 5.0
"""A connection that has not authenticated by then is dropped."""
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
        with suppress(*REFUSED), _dropped_unless_done(peer) as connection:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = receive(connection)
            send(connection, WELCOME)
            self._accepted.put((hello, connection))


@contextmanager
def _dropped_unless_done(peer: socket.socket) -> Iterator[Connection]:
    """Take over a socket; close it after an error, or where the block takes too long."""
    connection = Connection(os.dup(peer.fileno()))
    timer = threading.Timer(SECONDS_TO_AUTHENTICATE, _shut, [peer])
    timer.daemon = True
    timer.start()
    try:
        yield connection
    except BaseException:
        connection.close()
        raise
    finally:
        timer.cancel()
        timer.join()
        peer.close()


def _shut(peer: socket.socket) -> None:
    """End a connection for whoever reads from it."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _listen(env: JobEnvironment, key: bytes) -> list[socket.socket]:
    """Return sockets that listen on the first port that is free at all addresses of this node."""
    addresses = [a for a in _own_addresses(env) if _can_listen(a, 0)] or [""]
    for port in env.ports(key):
        with suppress(OSError):
            return [_listening(address, port) for address in addresses]
    raise VitsweepError(f"The ports {env.ports(key)} are all taken on {env.node_name}.")


def _own_addresses(env: JobEnvironment) -> list[str]:
    """Return the addresses under which the other nodes know this one.

    Where its name means this machine alone (127.0.1.1 in /etc/hosts), others know it by another.
    """
    found = []
    for known in env.addresses:
        with suppress(OSError):
            address = socket.getaddrinfo(known, None)[0][4][0]
            if known == address or not ipaddress.ip_address(address).is_loopback:
                found.append(str(address))
    return list(dict.fromkeys(found))


def _can_listen(address: str, port: int) -> bool:
    try:
        _listening(address, port).close()
    except OSError:
        return False
    return True


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
        for address in env.addresses:
            for port in env.ports(key):
                with suppress(*REFUSED):
                    peer = socket.create_connection((address, port), SECONDS_TO_AUTHENTICATE)
                    peer.settimeout(None)
                    with _dropped_unless_done(peer) as connection:
                        answer_challenge(connection, key)
                        deliver_challenge(connection, key)
                        send(connection, _hello(env, address))
                        receive(connection)  # the welcome: it was not dropped meanwhile
                    return connection
        time.sleep(0.2)
    raise VitsweepError(f"{env.node_name} cannot reach {' or '.join(env.addresses)}.")


def _hello(env: JobEnvironment, address: str) -> dict[str, Any]:
    return {
        "node_index": env.node_index,
        "node": env.node_name,
        "address": address,
        "pid": os.getpid(),
    }


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
