"""A rank that the kernel kills for its memory is out of memory; one that somebody kills is not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from vitsweep.execution.outcome import RankEnd, failure_of

LIMIT_BYTES = 300 * 2**20

PROGRAM = """
import dataclasses, json, multiprocessing, os, signal, sys
from pathlib import Path
from vitsweep.execution.rank_processes import LocalRanks

def rank(mode, rank, local_rank):
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    blocks = []
    while True:
        blocks.append(bytearray(os.urandom(2**20)) * 16)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    ranks = LocalRanks(
        multiprocessing.get_context("fork"), rank, (sys.argv[2],), [0], Path(sys.argv[3])
    )
    while ranks.running:
        ranks.wait(1)
    print(json.dumps(dataclasses.asdict(ranks.ends()[0])))
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory."""
    version_1 = Path("/sys/fs/cgroup/memory")
    root, limit = (
        (version_1, "memory.limit_in_bytes")
        if version_1.exists()
        else (Path("/sys/fs/cgroup"), "memory.max")
    )
    folder = root / f"vitsweep_test_{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        (folder / limit).write_text(str(LIMIT_BYTES))
        with suppress(OSError):
            (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        pytest.skip(f"needs a control group with a memory limit: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize(("mode", "status"), [("memory", "out_of_memory"), ("killed", "killed")])
def test_a_rank_killed_for_its_memory_is_out_of_memory(
    small_group: Path, tmp_path: Path, mode: str, status: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, small_group, mode, tmp_path],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    failure = failure_of([RankEnd(**json.loads(done.stdout))], True, 1)
    assert failure is not None
    assert (str(failure.status), failure.rank) == (status, 0)
    assert ("oom_kill" in failure.reason) == (mode == "memory")
