"""`hydra/launcher=allocation`: which nodes there are, what starts agents there, and what becomes of runs."""

import hashlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from tests.cells import LAPTOP, TINY, composer
from tests.command import SWEEP, Command, fault
from tools.chaos import runs_in
from vitsweep import extras, job_environment
from vitsweep.cli.main import run
from vitsweep.console import interrupts_to
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.attempts import ALLOCATION, attempts, unfinished
from vitsweep.extras.allocation import launcher, verb_agent
from vitsweep.extras.allocation.launcher import (
    KEY,
    Allocation,
    Starter,
    _require_alike,
    _script,
    hosts_of_job,
    node_facts,
    refuse_to_cancel,
    shared_key,
)
from vitsweep.files import append_line
from vitsweep.foreign import read_lines
from vitsweep.interpreters import variables as variables_of_processes
from vitsweep.job_environment import scheduler_job
from vitsweep.launchers.nodes import agent, transport
from vitsweep.launchers.nodes.transport import AgentListener, connect, receive, send
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.results.store import Store

BIN = Path(__file__).parent / "bin"
HOSTS = ("127.0.0.1", "127.0.0.2")
FIELDS = {"start": "ssh", "start_args": (), "hosts": HOSTS, "minutes": None}
OF_SCHEDULERS = (
    "PBS_NODEFILE", "PBS_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_JOBID", "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID", "SLURMD_NODENAME",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_SCHEDULERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")


def on(num_nodes: int = 2, start: str = "ssh", *args: str) -> tuple[str, ...]:
    """What is typed for nodes that are all this machine."""
    hosts = ",".join(f"127.0.0.{n + 1}" for n in range(num_nodes))
    options = ",".join(f"'{arg}'" for arg in args)
    return (
        "hydra/launcher=allocation",
        f"hydra.launcher.hosts=[{hosts}]",
        f"hydra.launcher.start={start}",
        f"hydra.launcher.start_args=[{options}]",
        "resources.ranks_per_node=1",
        "resources.threads_per_rank=1",
    )


# Which nodes there are.


def test_each_scheduler_names_its_nodes_and_the_end_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (hosts_of_job(), scheduler_job()) == ([], "")
    (tmp_path / "nodes").write_text("a\na\nb\n")
    answer = SimpleNamespace(stdout="n1\nn2\n", returncode=0)
    monkeypatch.setattr(job_environment, "captured", lambda *_, **__: answer)
    for variables, hosts, ends in (
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}, ["n1", "n2"], "scancel 7"),
        ({"LSB_HOSTS": "a a b", "LSB_JOBID": "8"}, ["a", "a", "b"], "bkill 8"),
        ({"LSB_MCPU_HOSTS": "a 4 b 4", "LSB_JOBID": "8"}, ["a", "b"], "bkill 8"),
        (
            {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "9.s"},
            ["a", "a", "b"],
            "qdel 9.s",
        ),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert (hosts_of_job(), scheduler_job()) == (hosts, ends)
    monkeypatch.setenv("PBS_NODEFILE", "/no/such/file")
    with pytest.raises(VitsweepError, match=r"`\$PBS_NODEFILE=/no/such/file` cannot be read"):
        hosts_of_job()
    (tmp_path / "empty").write_text("\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "empty"))
    with pytest.raises(
        VitsweepError, match=r"`\$PBS_NODEFILE=/.*/empty` names no node: it is empty"
    ):
        hosts_of_job()
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    found = Allocation({**FIELDS, "hosts": None, "start": "pbsdsh"})
    assert found.lines == {"a": 0, "b": 2}
    assert found._prefix("pbsdsh", "b") == ["pbsdsh", "-n", "2", "--"]


def test_where_nothing_names_nodes_it_is_said() -> None:
    with pytest.raises(BadValueError, match=r"`hydra\.launcher\.hosts=\[a,b\]`"):
        Allocation({**FIELDS, "hosts": None})
    with pytest.raises(BadValueError, match=r"hydra\.launcher\.start"):
        Allocation({**FIELDS, "start": "rsh"})
    for hosts in (("a", ""), ("a", "a")):
        with pytest.raises(
            BadValueError, match=r"`hydra\.launcher\.hosts=\[a,a?\]` must name each"
        ):
            Allocation({**FIELDS, "hosts": hosts})
    typed = ["results/a", "--index=1", "--nodes=2", "--first="]
    with pytest.raises(BadValueError, match="`--first ''`"):
        verb_agent.run(typed)


def test_a_host_of_another_domain_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "own_addresses", lambda _: [])
    for own, full, host, is_here in (
        ("n1", "n1.x.org", "n1", True),
        ("n1", "n1.x.org", "n1.x.org", True),
        ("n1", "n1.x.org", "n1.x", True),
        ("n1", "n1.x.org", "n1.y.org", False),
        ("n1", "n1", "n1.y.org", True),
        ("n1", "n1", "n2", False),
        ("n1", "localhost.localdomain", "n1.y.org", True),
    ):
        monkeypatch.setattr(socket, "gethostname", lambda own=own: own)
        monkeypatch.setattr(socket, "getfqdn", lambda full=full: full)
        found = Allocation({**FIELDS, "hosts": ("other", host)})
        if is_here:
            assert found.names() == [host, "other"]
        else:
            with pytest.raises(BadValueError, match="none of the nodes"):
                found.names()


def test_the_command_runs_on_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Allocation(FIELDS).names() == [*HOSTS]
    own = socket.gethostname()
    assert Allocation({**FIELDS, "hosts": ("nosuch.example", own)}).names() == [
        own,
        "nosuch.example",
    ]
    monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.2")
    assert Allocation(FIELDS).names() == [*reversed(HOSTS)]
    for start, line in (
        ("ssh", r"`ssh -o BatchMode=yes nosuch\.example 'cd .* && .*'`"),
        ("none", r"`ssh "),
        ("srun", r"`srun --overlap -N1 -n1 -w nosuch\.example --cpu-bind=none sh -c 'cd "),
    ):
        elsewhere = Allocation({**FIELDS, "hosts": ("nosuch.example",), "start": start})
        with pytest.raises(BadValueError, match=line):
            elsewhere.names()


def test_a_cell_of_more_nodes_than_there_are_is_invalid() -> None:
    machine = replace(LAPTOP, nodes=2)
    for nodes, num in ((2, 0), (3, 1)):
        entry = plan_cell(composer().compose([*TINY, f"resources.nodes={nodes}"]), machine)
        assert len([r for r in entry.reasons if f"`resources.nodes={nodes}`" in r]) == num


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("ssh", "ssh X -o BatchMode=yes h"),
        ("srun", "srun X --overlap -N1 -n1 -w h --cpu-bind=none"),
        ("mpirun", "mpirun X --host h -n 1 --bind-to none"),
        ("blaunch", "blaunch X h"),
        ("pbsdsh", "pbsdsh X -n 1 --"),
    ],
)
def test_a_starter_is_a_prefix_with_options_of_the_user(start: str, words: str) -> None:
    found = Allocation({**FIELDS, "hosts": ("g", "h"), "start_args": ("X",)})
    assert found._prefix(start, "h") == words.split()


# What an agent is given, and what it says.


def test_the_script_passes_on_what_ranks_need_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "NCCL_DEBUG": "a b", "HF_TOKEN": "hf_x", "SLURM_PROCID": "3", "TMPDIR": "/job/1", "MY_OWN": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    script = _script(Store(tmp_path / "my sweep"), 2, "a", b"key", False)
    assert "unset VITSWEEP_AGENT_KEY\n" in script
    assert "unset" not in _script(Store(tmp_path / "my sweep"), 2, "a", b"key", True)
    assert "export NCCL_DEBUG='a b'\n" in script
    for name in ("HF_TOKEN", "SLURM_PROCID", "TMPDIR", "MY_OWN"):
        assert f"export {name}=" not in script
    assert f"vitsweep agent '{tmp_path}/my sweep' --nodes 2 --first a --index \"$1\"" in script


def test_a_key_of_the_user_is_one_of_each_sweep_and_of_agents_that_he_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.chdir(tmp_path)
    own, other = (Path(f"/mnt/results/{name}") for name in "ab")
    assert shared_key(own) == shared_key(Path("/work/a")) == shared_key(Path("x/../a/"))
    assert shared_key(own) != shared_key(other)
    keys = []

    def listener(names: Any, addresses: Any, key: bytes) -> Any:
        keys.append(key.decode())
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "AgentListener", listener)
    store = Store(tmp_path / "a").create()
    for start in ("none", "ssh"):
        opened = Allocation({**FIELDS, "start": start})._opened(HOSTS, Console(), store, {})
        with pytest.raises(KeyboardInterrupt), opened:
            pass
    assert [key == shared_key(store.root) for key in keys] == [True, False]
    monkeypatch.delenv(KEY)
    assert shared_key(own) == ""


def test_an_agent_that_the_command_started_ends_with_the_key_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reader(**variables: str) -> Callable[[], bytes]:
        given: list[Any] = []
        monkeypatch.setattr(verb_agent, "run_agent", lambda *each, **_: given.extend(each) or 0)
        with variables_of_processes(variables):
            assert run(["agent", str(tmp_path), "--index=1", "--nodes=2", "--first=a"]) == 0
        found: Callable[[], bytes] = given[2]
        return found

    path, of_command = tmp_path / "agents" / "key", hashlib.sha256(b"ours").hexdigest()
    path.parent.mkdir()
    typed, started = reader(), reader(**{launcher.STARTED: of_command})
    for after in (lambda: path.write_text("another"), path.unlink):
        path.write_text("earlier")
        assert started() == b"earlier", "as a file system may still show"
        path.write_text("ours")
        assert started() == b"ours"
        after()
        with pytest.raises(VitsweepError, match=f"The command has ended: .*{path}"):
            started()
        started = reader(**{launcher.STARTED: of_command})
    with pytest.raises(FileNotFoundError):
        started()
    monkeypatch.setattr(verb_agent, "SECONDS_TO_SEE", -1)
    with pytest.raises(VitsweepError, match="The command has ended"):
        reader(**{launcher.STARTED: of_command})()
    for text in ("ours", "another"):
        path.write_text(text)
        assert typed() == text.encode()


@pytest.mark.parametrize("fails", [False, True])
def test_a_command_that_ends_before_its_agents_connect_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    store, started = Store(tmp_path / "a").create(), list[subprocess.Popen[bytes]]()

    class Interrupting(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(["sleep", "60"], start_new_session=True)
            started.append(self)
            if not fails:
                os.kill(os.getpid(), signal.SIGTERM)

    def refuse(*_: Any) -> None:
        raise VitsweepError("No connection.")

    listener = SimpleNamespace(accept_agents=refuse, close=lambda: None)
    monkeypatch.setattr(launcher, "AgentListener", lambda *_: listener)
    monkeypatch.setattr(launcher.subprocess, "Popen", Interrupting)
    opened = Allocation(FIELDS)._opened(HOSTS, Console(), store, {})
    with (
        interrupts_to(signal.default_int_handler),
        pytest.raises(VitsweepError if fails else KeyboardInterrupt),
        opened,
    ):
        pass
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    assert not (store.root / "agents" / "key").exists()


def test_ranks_of_other_users_write_to_no_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = [multiprocessing.Pipe() for _ in HOSTS]
    hello = {"node": "a", "address": HOSTS[0], **node_facts()}
    agents = [(hello, here) for here, _ in pipes]
    listener = SimpleNamespace(accept_agents=lambda *_: agents, close=lambda: None)
    monkeypatch.setattr(launcher, "AgentListener", lambda *_: listener)
    monkeypatch.setattr(launcher, "SECONDS_TO_END", 0)
    store = Store(tmp_path / "a").create()
    allocation = Allocation({**FIELDS, "start": "none"})
    with allocation._opened(HOSTS, Console(), store, {}) as nodes:
        assert (store.root / "agents" / "key").stat().st_mode & 0o777 == 0o600
        private = [path for path in store.root.iterdir() if not path.stat().st_mode & 0o77]
        assert [path.name for path in private] == ["agents"]
        assert nodes.scratch.parent == store.root


def test_unlike_nodes_are_refused_by_name() -> None:
    own = node_facts()
    _require_alike(["a", "b"], [own, own])
    for key in own:
        with pytest.raises(VitsweepError, match=f"Node b .*{key} other, not"):
            _require_alike(["a", "b"], [own, own | {key: "other"}])


def test_an_agent_waits_for_the_key_and_says_what_it_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in ("0", "2"):
        assert run(["agent", str(tmp_path), "--index", index, "--nodes", "2", "--first", "a"]) == 2
        assert f"`--index {index}`" in capsys.readouterr().err
    monkeypatch.setattr(agent, "connect", lambda *given, **facts: connect(*given, timeout_s=0.3))
    monkeypatch.setattr(agent, "ignore_signals", lambda: None)
    monkeypatch.setattr(agent, "make_socket_folder", lambda: tmp_path / "sockets")
    typed = ["agent", str(tmp_path / "s"), "--index", "1", "--nodes", "2", "--first", "127.0.0.1"]
    assert run(typed) == 1
    assert f"`{tmp_path}/s/agents" in capsys.readouterr().err


def on_the_wire(port: int) -> bytearray:
    """Carry one connection from the second host to the first; return what its agent says there."""
    said, server = bytearray(), socket.create_server((HOSTS[1], port))

    def carry() -> None:
        first = socket.create_connection((HOSTS[0], port))
        with server, server.accept()[0] as peer, first:
            other = {peer: first, first: peer}
            while True:
                for end in (peer, first):
                    if end in wait([peer, first], 0.1):
                        data = end.recv(4096)
                        said.extend(data if end is peer else b"")
                        other[end].sendall(data)
                        if not data:
                            return

    threading.Thread(target=carry, daemon=True).start()
    return said


def test_strangers_get_nothing_and_end_nothing() -> None:
    key = os.urandom(32)
    listener = AgentListener(HOSTS, HOSTS[:1], key)
    port = listener._listening[0].getsockname()[1]
    said = on_the_wire(port)
    mine = [connect(0, HOSTS[1:], lambda: key)]
    assert b"node_index" in said
    peers = [socket.create_connection((HOSTS[0], port)) for _ in range(150)]
    for number, peer in enumerate(peers):
        if number % 3:
            peer.sendall((b"GET / HTTP/1.0\r\n\r\n" + os.urandom(64)) if number % 3 == 1 else said)
    mine.append(connect(1, HOSTS[:1], lambda: key))
    agents = listener.accept_agents(60)
    assert [hello["node_index"] for hello, _ in agents] == [0, 1]
    challenge = re.compile(rb"\0\0\0.#CHALLENGE#.{20,50}?(\0\0\0\x09#FAILURE#)?", re.S)
    for peer in peers:
        heard = b""
        with peer, suppress(ConnectionError):
            peer.settimeout(60)
            while data := peer.recv(4096):
                heard += data
        assert not heard or challenge.fullmatch(heard), "and nothing else"
    assert [name for _, name in mine] == [*HOSTS]
    for (own, _), (_, other) in zip(mine, agents, strict=True):
        send(own, {"says": "what it did before"})
        assert receive(other) == {"says": "what it did before"}
    listener.close()
    for connection in (*(c for c, _ in mine), *(c for _, c in agents)):
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOSTS[0], port))


def test_a_node_has_one_agent() -> None:
    key = os.urandom(32)
    listener = AgentListener(("a", "b"), HOSTS[:1], key)

    def agent_on(index: int, machine: str) -> multiprocessing.connection.Connection:
        return connect(index, HOSTS[:1], lambda: key, machine=f"{machine} boot-id")[0]

    first, second = agent_on(0, "alpha"), agent_on(1, "beta")
    for index, others in ((0, "alpha already, and this one on gamma"), (1, "beta already")):
        with pytest.raises(VitsweepError, match=f"refuses node {index}: .* runs on {others}"):
            agent_on(index, "gamma")
    send(second, {"says": "then it ended"})
    second.close()
    until(lambda: not transport._is_open(listener._agents[1][1]))
    before = [listener._agents[index][1] for index in range(2)]
    second, again = agent_on(1, "gamma"), agent_on(0, "alpha")
    until(lambda: all(listener._agents[i][1] is not before[i] for i in range(2)))
    agents = listener.accept_agents(60)
    assert [hello["machine"].split()[0] for hello, _ in agents] == ["alpha", "gamma"]
    send(again, {"says": "again"})
    assert receive(agents[0][1]) == {"says": "again"}
    listener.close()
    first.close()


def test_who_waits_says_for_whom_and_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "SECONDS_OF_SILENCE", 0.1)
    monkeypatch.setattr(launcher, "SECONDS_TO_CONNECT", 0.5)
    words = ["sh", "-c", "echo its last line; sleep 60"]
    monkeypatch.setattr(launcher, "Starter", lambda _, log: Starter(words, log))
    store = Store(tmp_path / "my sweep").create()
    typed = f"python -P -m vitsweep agent '{store.root}' --index 1 --nodes 2 --first {HOSTS[0]}"
    last = r"its last line, see `.*/agents/"
    for start, said, late in (
        ("none", [f"On {HOSTS[1]}: `{typed}`"], rf"{last}0\.log`\), {HOSTS[1]} within"),
        ("ssh", [], rf"{last}0\.log`\), {HOSTS[1]} \({last}1\.log`\) within"),
    ):
        opened = Allocation({**FIELDS, "start": start})._opened(HOSTS, Console(), store, {})
        with pytest.raises(VitsweepError, match=late), opened:
            pass
        expected = [f"Waiting for the agents of {', '.join(HOSTS)}.", *said]
        assert capsys.readouterr().out.splitlines() == expected


def test_an_agent_of_another_number_of_nodes_is_told_so() -> None:
    key = os.urandom(32)
    listener = AgentListener(("a", "b"), HOSTS[:1], key)
    for index in (1, 2):
        with pytest.raises(VitsweepError, match="has `--nodes 2`, and this agent `--nodes 3`"):
            connect(index, HOSTS[:1], lambda: key, nodes=3)
    listener.close()


def test_an_agent_leaves_a_first_node_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = multiprocessing.Pipe()
    monkeypatch.setattr(agent, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(agent, "SECONDS_UNTIL_LOST", 0.05)
    serving = threading.Thread(target=agent.Agent(mine).serve, daemon=True)
    serving.start()
    serving.join(60)
    assert not serving.is_alive()
    other.close()


# What becomes of attempts, whoever finds them.


def test_open_attempts_of_an_allocation_are_over_for_whoever_holds_the_lock(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").create()
    line = {"event": "start", "attempt": 1, "node": "elsewhere", "pid": 1, "job": None, "time": 1.0}
    for run_id, by in (("a", ALLOCATION), ("b", "local")):
        append_line(store.cell("c") / "attempts.jsonl", line | {"run_id": run_id, "launcher": by})
    assert [attempt.run_id for attempt in unfinished(store, "c")] == ["a"]
    assert not attempts(store, "c")[0].is_running


def test_cancel_names_the_host_and_what_to_type(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").create()
    refuse_to_cancel(store)
    for job, said in (
        ("qdel 12.server", "`qdel 12.server`"),
        ("", "Ctrl-C"),
        ("rm -rf x", "Ctrl-C"),
    ):
        store.append_command({"cells": [], "allocation": {"host": "n1", "job": job}})
        with store.lock(lambda: None), pytest.raises(VitsweepError, match=f"n1.*{said}") as error:
            refuse_to_cancel(store)
        assert "rm" not in str(error.value)
        refuse_to_cancel(store)


# Whole commands; all nodes are this machine.


@pytest.mark.smoke
def test_a_cell_runs_on_two_nodes_that_are_given_no_environment(vitsweep: Command) -> None:
    done = vitsweep(*on(), "resources.nodes=2", "sweep.baseline=null")
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = vitsweep.runs().to_dict("records")
    assert (row["status"], row["launcher"], row["nodes_used"]) == (
        "measured",
        "allocation",
        "127.0.0.1,127.0.0.2",
    )
    assert not (vitsweep.store.root / "agents" / "key").exists()
    assert agents_of(vitsweep) == []


def agents_of(vitsweep: Command, sweep: str = SWEEP) -> list[psutil.Process]:
    """The agents of a sweep, by index."""
    folder, found = str(vitsweep.store.root.with_name(sweep).absolute()), {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "agent" in words and folder in words and "--index" in words and "-c" in words:
            found[int(words[words.index("--index") + 1])] = process
    return [found[index] for index in sorted(found)]


def processes_of(vitsweep: Command) -> list[psutil.Process]:
    """All processes in the folder of a sweep, wherever they run."""
    return [process for process in psutil.process_iter() if runs_in(process, vitsweep.folder)]


def until(done: Callable[[], Any], seconds: float = 200) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def ranks_run(vitsweep: Command) -> bool:
    return any(vitsweep.folder.glob("results/*/cells/*/attempts/*/rank1.log"))


@pytest.mark.full
@pytest.mark.parametrize("start", ["pbsdsh", "blaunch", "none"])
def test_other_starters(vitsweep: Command, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, most = None, 4
    if start == "none":
        most = 2
        words = ["agent", str(vitsweep.store.root), "--index=1", "--nodes=2", f"--first={HOSTS[0]}"]
        beside = vitsweep.start(*words, python=["-P"], quick=False)
    done = vitsweep(
        "-m", *on(most, start), f"resources.nodes=range(2,{most + 1},2)", "sweep.baseline=null"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {*vitsweep.runs()["nodes_used"].str.count(",") + 1} == {2, most}
    if beside:
        told = beside.communicate(timeout=60)
        assert beside.returncode == 0, told
    log = (vitsweep.store.root / "agents" / "1.log") if start == "pbsdsh" else None
    assert log is None or log.read_text().startswith("index 1")


@pytest.mark.full
def test_mpirun_starts_agents(vitsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run(["which", "mpirun"], capture_output=True).returncode:
        pytest.skip("needs OpenMPI: `apt-get install openmpi-bin`")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    done = vitsweep("-m", *on(4, "mpirun"), "resources.nodes=2,4", "sweep.baseline=null")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {*vitsweep.runs()["nodes_used"].str.count(",") + 1} == {2, 4}


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A real sshd on loopback; yields the options of ssh."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("needs sshd: `apt-get install openssh-server`")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = (
        f"Port {port}", "ListenAddress 0.0.0.0", f"HostKey {tmp_path}/host", "StrictModes no", "UsePAM no",
        f"AuthorizedKeysFile {tmp_path}/user.pub", f"PidFile {tmp_path}/pid", "PermitRootLogin yes",
    )  # fmt: skip
    (tmp_path / "conf").write_text("\n".join(settings) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", tmp_path / "conf"])
    given = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null")
    yield ("-p", str(port), "-i", f"{tmp_path}/user", *(w for o in given for w in ("-o", o)))
    daemon.terminate()
    daemon.wait()


@pytest.mark.full
def test_real_ssh_measures_cells_of_one_two_and_four_nodes(
    vitsweep: Command, sshd: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"].removeprefix(f"{BIN}{os.pathsep}"))
    words = ("-m", *on(4, "ssh", *sshd), "resources.nodes=1,2,4,5", "sweep.baseline=null")
    done = vitsweep(*words, "measurement.prove=twin")
    assert done.returncode == 3, done.stdout + done.stderr
    rows = vitsweep.cells().set_index("nodes")["status"].to_dict()
    assert rows == {1: "measured", 2: "measured", 4: "measured", 5: "invalid"}
    used = vitsweep.runs().set_index("nodes")["nodes_used"].str.count(",").to_dict()
    assert used == {1: 0, 2: 1, 4: 3}


@pytest.mark.full
def test_the_death_of_an_agent_ends_its_run_and_the_same_command_goes_on(vitsweep: Command) -> None:
    words = (*on(), "resources.nodes=2", "sweep.baseline=null", *fault("Hang"))
    running = vitsweep.fork(*words)
    until(lambda: ranks_run(vitsweep))
    agents_of(vitsweep)[1].kill()
    out, errors = running.communicate(200)
    assert running.returncode == 3, out + errors
    assert "the same command goes on" in errors
    [row] = vitsweep.runs().to_dict("records")
    assert (row["status"], "Node 127.0.0.2 was lost" in row["reason"]) == ("killed", True)
    assert agents_of(vitsweep) == []


@pytest.mark.full
@pytest.mark.parametrize(("seconds", "code", "status"), [(60, 0, "measured"), (200, 3, "killed")])
def test_an_agent_that_is_stopped_for_longer_than_three_minutes_is_lost(
    vitsweep: Command, seconds: float, code: int, status: str
) -> None:
    words = (*on(), "resources.nodes=2", "sweep.baseline=null")
    running = vitsweep.fork(*words)
    until(lambda: ranks_run(vitsweep))
    stopped = agents_of(vitsweep)[1]
    stopped.suspend()
    time.sleep(seconds)  # what the test is about
    assert (running.poll() is None) is (code == 0)
    stopped.resume()
    out, errors = running.communicate(200)
    assert running.returncode == code, out + errors
    [row] = vitsweep.runs().to_dict("records")
    assert (row["status"], "silent for 180 s" in row["reason"]) == (status, code == 3)
    until(lambda: not processes_of(vitsweep), 60)
    again = vitsweep(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert vitsweep.cells()["status"].tolist() == ["measured"]


@pytest.mark.full
def test_a_command_that_is_killed_leaves_no_process_and_the_same_goes_on(vitsweep: Command) -> None:
    words = ("-m", *on(), "resources.nodes=2", "sharding=ddp,fsdp")
    running = vitsweep.fork(*words)
    until(lambda: ranks_run(vitsweep))
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(60)
    until(lambda: not agents_of(vitsweep), 60)
    done = vitsweep(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = vitsweep.cells()
    assert (len(cells), set(cells["status"])) == (2, {"measured"})
    lines = [line for p in vitsweep.store.cells.glob("*/attempts.jsonl") for line in read_lines(p)]
    assert {line["launcher"] for line in lines if line["event"] == "start"} == {"allocation"}


@pytest.mark.full
def test_where_the_node_of_the_command_falls_silent_the_others_end(vitsweep: Command) -> None:
    words = (*on(), "resources.nodes=2", "sweep.baseline=null")
    running = vitsweep.fork(*words)
    until(lambda: ranks_run(vitsweep))
    command, other = psutil.Process(running.pid), agents_of(vitsweep)[1]
    elsewhere = {other, *other.parents(), *other.children(recursive=True)} - {command}
    gone = {command, *command.children(recursive=True)} - elsewhere
    for process in gone:
        process.suspend()  # a node without power says nothing either, and ends no connection
    until(lambda: {*processes_of(vitsweep)} <= gone, 300)
    assert "silent for 180 s" in (vitsweep.store.root / "agents" / "1.log").read_text()
    for process in gone:
        process.kill()
    running.communicate(60)
    until(lambda: not processes_of(vitsweep), 60)
    again = vitsweep(*words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert vitsweep.cells()["status"].tolist() == ["measured"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_signals_of_schedulers_end_the_command(
    vitsweep: Command, number: signal.Signals
) -> None:
    running = vitsweep.fork(*on(), "resources.nodes=2", "sweep.baseline=null", *fault("Hang"))
    until(lambda: ranks_run(vitsweep))
    running.send_signal(number)
    _, errors = running.communicate(200)
    assert running.returncode == 143, errors
    until(lambda: not agents_of(vitsweep), 30)


@pytest.mark.full
def test_agents_of_a_command_that_is_stopped_while_they_connect_end(vitsweep: Command) -> None:
    running = vitsweep.fork(*on(), "resources.nodes=2", "sweep.baseline=null")
    until(lambda: agents_of(vitsweep))
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(60)
    assert running.returncode == 143, errors
    until(lambda: not processes_of(vitsweep), 100)


@pytest.mark.full
@pytest.mark.skipif("compare" not in extras.FEATURES, reason="`compare` is not there")
def test_a_comparison_that_loses_a_node_says_so_and_the_same_goes_on(vitsweep: Command) -> None:
    words = ("compare", "seed=1", "seed=2", *on(), "resources.nodes=2", *TINY, "--minutes=0.2")
    running = vitsweep.fork(*words, quick=False)
    until(lambda: ranks_run(vitsweep))
    agents_of(vitsweep, "compare")[1].kill()
    out, errors = running.communicate()
    assert running.returncode == 3, out + errors
    assert "the same command goes on" in errors
    assert "The budget" not in out
    again = vitsweep(*words, quick=False)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.full
@pytest.mark.skipif("explain" not in extras.FEATURES, reason="`explain` is not there")
def test_cells_of_two_nodes_are_explained_on_two_nodes_alone(vitsweep: Command) -> None:
    done = vitsweep("-m", *on(), "resources.nodes=2", "memory=keep_all,recompute_blocks")
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("explain", SWEEP, "recompute_blocks", "keep_all")
    elsewhere = vitsweep(*words, quick=False)
    assert elsewhere.returncode == 2, elsewhere.stdout + elsewhere.stderr
    assert "hydra/launcher=allocation" in elsewhere.stderr
    launcher = [word for word in on() if word.startswith("hydra")]
    told = vitsweep(*words, *launcher, "--blocks=3", "--minutes=2", "--json", quick=False)
    assert told.returncode == 0, told.stdout + told.stderr
    causes = {each["cause"]: each["ms"] for each in json.loads(told.stdout)["causes"]}
    assert causes["recomputation"] > 0
    assert set(vitsweep.runs()["nodes_used"]) == {"127.0.0.1,127.0.0.2"}
