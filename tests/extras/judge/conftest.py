"""Judgments whose sides are forked where torch is imported."""

import os
import runpy
import socket
import sys
from multiprocessing import reduction
from typing import Any

import pytest

from vitsweep.execution.rank_processes import fork_server
from vitsweep.extras.judge.sides import RANK_FILE, Side


class ForkedServer:
    """What a `Side` uses of its `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def start(side: Side) -> None:
    side.close()
    side.folder.mkdir(parents=True, exist_ok=True)
    own, other = socket.socketpair()
    with side.log.open("ab") as log, other:
        told = [reduction.DupFd(each.fileno()) for each in (other, log)]
        process = fork_server().Process(
            target=_serve, args=(str(side.tree.root), {**os.environ}, *told)
        )
        process.start()
    side._server, side._control = ForkedServer(process), own  # type: ignore[assignment]


def _serve(root: str, environment: dict[str, str], control: Any, log: Any) -> None:
    """Become the fork server of a side."""
    os.setsid()
    os.chdir(root)
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    descriptor = log.detach()
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.argv = [str(RANK_FILE), str(control.detach())]
    runpy.run_path(str(RANK_FILE), run_name="__main__")


@pytest.fixture
def forked_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start sides in a fraction of the time; those of `test_cheats.py` are started as the product does."""
    monkeypatch.setattr(Side, "start", start)
