"""Authenticated connections from the agents of all nodes to the coordinator on the first node."""

import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.node.job_environment import JobEnvironment

SECONDS_TO_CONNECT = 180.0
"""How long the nodes of a job may take to connect; some boot, or load Python from a slow disk."""


class AgentListener:
    """The coordinator's end: accepts one connection from the agent of each node.

    Args:
        env: of the first node.
        key: with which agents authenticate.
    """

    def __init__(self, env: JobEnvironment, key: bytes) -> None:
        self._listener = _listen(env, key)
        self._accepted: queue.Queue[tuple[dict[str, Any], Connection]] = queue.Queue()
        threading.Thread(target=self._accept_loop, daemon=True).start()

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

    def _accept_loop(self) -> None:
        while True:
            with suppress(multiprocessing.AuthenticationError, EOFError, ValueError, OSError):
                connection = self._listener.accept()
                self._accepted.put((receive(connection), connection))


def _listen(env: JobEnvironment, key: bytes) -> Listener:
    for port in env.ports:
        with suppress(OSError):
            return Listener(("", port), backlog=4096, authkey=key)
    raise VitsweepError(f"The ports {env.ports} are all taken on {env.node_name}.")


def connect(env: JobEnvironment, key: bytes, timeout_s: float) -> Connection:
    """Connect an agent to the coordinator on the first node, and say which node it serves.

    Raises:
        VitsweepError: it cannot be reached.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for address in env.addresses:
            for port in env.ports:
                with suppress(OSError, EOFError, multiprocessing.AuthenticationError):
                    connection = Client((address, port), authkey=key)
                    send(connection, _hello(env, address))
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
