"""How the nodes of a job find one another: authenticated connections to its first node."""

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


class AgentListener:
    """The first node's door: agents of all nodes come in, one connection each."""

    def __init__(self, place: JobEnvironment, key: bytes) -> None:
        self._listener = _listen(place, key)
        self._arrived: queue.Queue[tuple[dict[str, Any], Connection]] = queue.Queue()
        threading.Thread(target=self._let_in, daemon=True).start()

    def gather(
        self, names: Sequence[str], seconds: float
    ) -> list[tuple[dict[str, Any], Connection]]:
        """Wait for the agents of all nodes; return their greetings and connections, in order.

        Raises:
            VitsweepError: some did not come; they are named.
        """
        here: dict[int, tuple[dict[str, Any], Connection]] = {}
        deadline = time.monotonic() + seconds
        while len(here) < len(names):
            try:
                greeting, connection = self._arrived.get(
                    timeout=max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                missing = ", ".join(n for i, n in enumerate(names) if i not in here)
                raise VitsweepError(
                    f"No word from {missing} within {seconds:.0f} s: the node is down, or it cannot "
                    f"reach {names[0]}."
                ) from None
            here[greeting["node_index"]] = greeting, connection
        return [here[index] for index in range(len(names))]

    def _let_in(self) -> None:
        while True:
            with suppress(multiprocessing.AuthenticationError, EOFError, ValueError, OSError):
                connection = self._listener.accept()
                self._arrived.put((receive(connection), connection))


def _listen(place: JobEnvironment, key: bytes) -> Listener:
    for port in place.ports:
        with suppress(OSError):
            return Listener(("", port), backlog=4096, authkey=key)
    raise VitsweepError(f"The ports {place.ports} are all taken on {place.name}.")


def join(place: JobEnvironment, key: bytes, seconds: float) -> Connection:
    """Connect to the first node and greet it.

    Raises:
        VitsweepError: it cannot be reached.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for address in place.addresses:
            for port in place.ports:
                with suppress(OSError, EOFError, multiprocessing.AuthenticationError):
                    connection = Client((address, port), authkey=key)
                    send(connection, _greeting(place, address))
                    return connection
        time.sleep(0.2)
    raise VitsweepError(f"{place.name} cannot reach {' or '.join(place.addresses)}.")


def _greeting(place: JobEnvironment, address: str) -> dict[str, Any]:
    return {
        "node_index": place.node_index,
        "node": place.name,
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
