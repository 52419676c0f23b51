"""Which device a rank takes, and what the process that forks ranks must not have touched."""

import gc
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cells import GPU_NODE, cell, entry
from vitsweep.errors import VitsweepError
from vitsweep.execution import process
from vitsweep.execution.process import own_device
from vitsweep.execution.rank_processes import PRELOADED, fork_server
from vitsweep.spec.from_yaml import _adapter, cell_from_tree

GPUS = cell(machine=GPU_NODE).resources


@pytest.mark.parametrize(("visible", "local_rank"), [(0, 0), (4, 4)])
def test_a_rank_without_a_gpu_of_its_own_fails_by_name(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(VitsweepError) as error:
        own_device(GPUS, local_rank)
    assert "`resources.device=cuda` with `resources.ranks_per_node=8`" in str(error.value)
    assert f"rank {local_rank}" in str(error.value)
    assert f"{visible} GPUs" in str(error.value)
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in str(error.value)


@pytest.mark.parametrize(("visible", "local_rank", "index"), [(8, 3, 3), (1, 3, 0)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert own_device(GPUS, local_rank) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


def _report(answers: Connection) -> None:
    server = os.getppid()
    beside = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    commands = [Path(f"/proc/{process}/cmdline").read_text() for process in beside]
    compilers = [command for command in commands if "compile_worker" in command]
    is_ready = "torch._inductor.async_compile" in sys.modules
    cuda = torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
    is_frozen = gc.get_freeze_count() > 100_000
    answers.send((*cuda, is_ready, compilers, is_frozen))


def test_the_fork_server_has_no_cuda_and_no_compiler_and_its_objects_are_frozen() -> None:
    """Ranks that compile are forked from it: pipes to a compiler's processes would be shared.

    A collection in a rank would look at all that the server imported, before the cell is read.
    """
    received, answers = multiprocessing.Pipe()
    forked = fork_server().Process(target=_report, args=(answers,))
    forked.start()
    assert received.poll(120), "the forked process did not answer"
    assert received.recv() == (False, False, False, [], True)
    forked.join()


def _first_cell(answers: Connection, tree: Mapping[str, Any]) -> None:
    before, built = set(sys.modules), _adapter.cache_info().misses
    cell_from_tree(tree)
    answers.send((sorted(sys.modules.keys() - before), _adapter.cache_info().misses - built))


def test_a_forked_process_imports_and_builds_nothing_to_read_its_first_cell() -> None:
    """What each rank would do again takes tens of milliseconds of each run."""
    received, answers = multiprocessing.Pipe()
    forked = fork_server().Process(target=_first_cell, args=(answers, entry("data=synthetic").tree))
    forked.start()
    assert received.poll(120), "the forked process did not answer"
    assert received.recv() == ([], 0)
    forked.join()


@pytest.mark.slow
def test_imports_of_the_fork_server_do_not_ask_for_gpus() -> None:
    """Even counting them makes CUDA unusable in forked processes. And each command waits for them all."""
    script = f"""
import sys
import torch
touched = []
torch.cuda._lazy_init = lambda: touched.append("initialised")
torch.cuda.is_available = torch.cuda.device_count = lambda: touched.append("counted") or 0
__import__({PRELOADED!r})
touched += sys.modules.keys() & {{"pandas", "scipy", "sklearn"}}
raise SystemExit(", ".join(touched) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_listens_on_the_address_that_the_others_were_given() -> None:
    for host in ("127.0.0.1", "localhost"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        listening = process._listening(host, port)
        if host == "localhost":  # a name for this machine alone may be another address elsewhere
            assert listening is None
            continue
        assert listening is not None
        with listening:
            assert listening.getsockname() == ("127.0.0.1", port)


def test_a_store_is_made_of_an_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def store(host: str, port: int, size: int, **more: Any) -> str:
        made.append((host, port, size, more["is_master"], more["master_listen_fd"]))
        return "store"

    minute = timedelta(minutes=1)
    monkeypatch.setattr(torch.distributed, "TCPStore", store)
    monkeypatch.setattr(process, "_listening", lambda host, port: None)
    for method in ("file:///tmp/meeting", "tcp://127.0.0.1", "tcp:///"):
        assert process._store(method, 0, 2, minute) is None
    assert process._store("tcp://n1:29500", 0, 2, minute) == "store"
    assert process._store("tcp://n1:29500", 1, 2, minute) == "store"
    assert made == [("n1", 29500, 2, True, None), ("n1", 29500, 2, False, None)]
    listening = SimpleNamespace(detach=lambda: 17)
    monkeypatch.setattr(process, "_listening", lambda host, port: listening)
    process._store("tcp://n1:29500", 0, 2, minute)
    process._store("tcp://n1:29500", 1, 2, minute)
    assert [each[-1] for each in made[2:]] == [17, None], "the first rank alone listens"


def test_memory_is_limited_to_what_is_in_use_and_the_share_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(process.resource, "setrlimit", lambda *given: limits.append(given))
    monkeypatch.setattr(process.resource, "getpagesize", lambda: 4096)
    monkeypatch.setattr(process, "_return_freed_memory", lambda: None)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: "900 800 700 600 500 1000 300")
    plain = cell().resources
    process.limit_memory(plain)
    process.limit_memory(replace(plain, memory_gib_per_rank=1.5, device="cuda"))
    assert limits == []
    process.limit_memory(replace(plain, memory_gib_per_rank=1.5, device="cpu"))
    limit = 1000 * 4096 + 3 * 2**29
    assert limits == [(resource.RLIMIT_DATA, (limit, limit))]


def test_a_script_is_not_run_again_by_the_processes_that_it_starts() -> None:
    main = sys.modules["__main__"]
    with process.main_module_left_alone():
        assert vars(sys.modules["__main__"]).get("__file__") is None
    assert sys.modules["__main__"] is main
