"""Connections of agents to the coordinator of a job: who gets in, and where it listens."""

import multiprocessing
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from vitsweep.errors import VitsweepError
from vitsweep.execution import process
from vitsweep.launchers.nodes import transport
from vitsweep.launchers.nodes.transport import (
    AgentListener,
    Nodes,
    connect,
    ports,
    receive,
    send,
)

TWO = ("127.0.0.2", "127.0.0.3")


def agent(index: int, key: bytes, timeout_s: float = 60) -> Connection:
    """The connection of the agent of a node."""
    return connect(index, TWO[:1], lambda: key, timeout_s)[0]


def listening_addresses() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.fixture
def key() -> bytes:
    """A key, and with it ports, of its own for every test: listeners end with the process."""
    return secrets.token_bytes()


def listener(key: bytes) -> tuple[AgentListener, tuple[str, int]]:
    """A listener, and the first address on which it listens."""
    before = listening_addresses()
    found = AgentListener(TWO, TWO[:1], key)
    return found, min(listening_addresses() - before)


def agents(listening: AgentListener, key: bytes) -> list[tuple[dict[str, Any], Connection]]:
    mine = [agent(index, key) for index in range(2)]
    found = listening.accept_agents(60)
    for number, connection in enumerate(mine):
        send(connection, {"from": number})
    return found


def read_to_the_end(peer: socket.socket) -> None:
    """Return when the other side has dropped the connection."""
    with suppress(ConnectionError):  # a reset, where something was sent that nobody read
        while peer.recv(4096):
            pass


def silent(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


def not_ours(address: tuple[str, int]) -> socket.socket:
    peer = socket.create_connection(address)
    peer.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
    return peer


@pytest.mark.parametrize("stranger", [silent, not_ours])
def test_a_stranger_is_dropped_and_holds_up_nobody(
    key: bytes, stranger: Callable[..., socket.socket]
) -> None:
    listening, address = listener(key)
    peers = [stranger(address) for _ in range(3)]
    found = agents(listening, key)
    assert [hello["node_index"] for hello, _ in found] == [0, 1]
    assert [receive(connection)["from"] for _, connection in found] == [0, 1]
    for peer in peers:
        with peer:
            peer.settimeout(60)
            read_to_the_end(peer)


def test_an_agent_of_another_job_is_refused(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    listening, (host, port) = listener(key)
    monkeypatch.setattr(transport, "ports", lambda key: [port])
    with pytest.raises(VitsweepError, match=r"found no command .* keys differ"):
        agent(0, b"another key", 0.5)
    with pytest.raises(multiprocessing.AuthenticationError):
        multiprocessing.connection.Client((host, port), authkey=b"another key")
    assert len(agents(listening, key)) == 2


def test_ports_follow_from_the_key_alone() -> None:
    one, other = (ports(secret) for secret in (b"a.7.0", b"b.7.0"))
    assert one != other
    assert one == ports(b"a.7.0")


@pytest.mark.parametrize(
    ("known", "address"),
    [(["127.0.0.2"], "127.0.0.2"), (["n1", "127.0.0.1"], "127.0.0.1"), (["n1"], "0.0.0.0")],
)
def test_it_listens_where_the_nodes_of_the_job_reach_it_and_nowhere_else(
    key: bytes, known: list[str], address: str
) -> None:
    before = listening_addresses()
    kept = AgentListener(("n1", "n2"), known, key)
    assert [ip for ip, _ in listening_addresses() - before] == [address]
    kept.close()
    assert listening_addresses() == before


def test_the_store_of_torch_listens_on_the_address_of_the_rendezvous_only() -> None:
    with socket.create_server(("127.0.0.5", 0)) as probe:
        port = probe.getsockname()[1]
    before = listening_addresses()
    store = process._store(f"tcp://127.0.0.5:{port}", 0, 1, timedelta(seconds=60))
    assert listening_addresses() - before == {("127.0.0.5", port)}
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert process._store("file:///tmp/x", 0, 1, timedelta(seconds=60)) is None
    assert process._listening(socket.gethostname(), 0) is None or not (
        socket.gethostbyname(socket.gethostname()).startswith("127.")
    )


@pytest.mark.parametrize("address", ["127.0.0.5", "localhost", "::1"])
def test_the_port_of_a_rendezvous_is_kept_for_rank_0(address: str) -> None:
    _, connection = multiprocessing.Pipe()
    nodes = Nodes([({"node": "n1", "address": address}, connection)], Path("warm_up"), {})
    with nodes.rendezvous() as init_method:
        port = urlsplit(init_method).port or 0
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("", port))
    store = process._store(init_method, 0, 1, timedelta(seconds=60))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with nodes.rendezvous() as other_method:
        assert urlsplit(other_method).port != port
    nodes.shut_down()


def test_heartbeats_wake_nobody_and_reports_do(key: bytes) -> None:
    listening, _ = listener(key)
    mine = [agent(index, key) for index in range(2)]
    nodes = Nodes(listening.accept_agents(60), Path("warm_up"), {})
    for _ in range(5):
        send(mine[0], {"do": "heartbeat"})
    before = nodes.all[0].received_at
    while nodes.all[0].received_at == before:
        nodes.receive(0.3)
    assert [node.report for node in nodes.all] == [{}, {}]
    send(mine[1], {"run": "r", "running": True, "ends": []})
    nodes.receive(60)
    assert nodes.all[1].report["run"] == "r"
    mine[0].close()
    nodes.receive(60)
    assert "node died" in nodes.lost
    send(mine[1], {"run": "s", "running": False, "ends": []})
    nodes.receive(60)  # a lost node is not read again
    assert nodes.all[1].report["run"] == "s"
