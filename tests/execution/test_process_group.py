"""Which device a rank takes, and what the process that forks ranks must not have touched."""

import gc
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.cells import GPU_NODE, cell
from vitsweep.errors import VitsweepError
from vitsweep.execution.process import own_device
from vitsweep.execution.rank_processes import PRELOADED, fork_server

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
    process = fork_server().Process(target=_report, args=(answers,))
    process.start()
    assert received.poll(120), "the forked process did not answer"
    assert received.recv() == (False, False, False, [], True)
    process.join()


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
