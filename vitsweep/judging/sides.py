"""A side as the judge sees it: a fork server of the candidate, whose runs are timed from here."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.code_hash import PACKAGE_FOLDER
from vitsweep.judging.trees import Tree

RANK_FILE = PACKAGE_FOLDER / "judging" / "rank.py"
LAST_LINES = 15


class RunFailedError(VitsweepError):
    """A run of a side ended without evidence; the text says why."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of one run.

    Attributes:
        seconds: of the window, by the judge's clock.
        losses: of each rank, by step.
        sums: name of a tensor -> checksum, of rank 0 at the window's end.
        evidence: what the ranks reported after it: rank 0's, with the modules of all.
        cpu_seconds: that the side's processes spent in the window, as the kernel counts them.
        left_running: processes that the run left behind, which were killed.
    """

    seconds: float
    losses: list[list[float]]
    sums: dict[str, int]
    evidence: dict[str, Any]
    cpu_seconds: float = 0.0
    left_running: int = 0


@dataclass(kw_only=True)
class Side:
    """One state of the code, with its own interpreter, caches and processes.

    Attributes:
        tree: its files.
        python: interpreter.
        paths: folders that its modules are imported from, first ones first.
        folder: for its logs and caches.
        timeout: seconds that any answer may take.
    """

    tree: Tree
    python: str
    paths: Sequence[str]
    folder: Path
    timeout: float
    _server: "subprocess.Popen[bytes] | None" = None
    _control: socket.socket | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.tree.side}.log"

    def start(self) -> None:
        """Start the fork server anew."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        caches = self.folder / "caches" / self.tree.side
        environment = os.environ | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        own, other = socket.socketpair()
        with self.log.open("ab") as log:
            self._server = subprocess.Popen(
                [self.python, str(RANK_FILE), str(other.fileno())],
                pass_fds=[other.fileno()],
                cwd=self.tree.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the judge's
            )
        other.close()
        self._control = own

    def close(self) -> None:
        """Kill the server and all that it started."""
        if self._server is not None:
            self._kill_descendants()
            self._server.kill()
            self._server.wait()
        if self._control is not None:
            self._control.close()
        self._server = self._control = None

    def run(self, request: dict[str, Any], go: int, ranks: int) -> RunResult:
        """Do one run, and time its window.

        Args:
            request: of all ranks.
            go: the seed of the window's batches, which the ranks learn when the clock runs.
            ranks: how many.

        Raises:
            RunFailedError: a rank failed, or did not answer in time.
        """
        from vitsweep.judging.rank import Channel

        if self._server is None or self._server.poll() is not None:
            self.start()
        assert self._control is not None
        pairs = [socket.socketpair() for _ in range(ranks)]
        requests = [request | self._place(rank, ranks, request) for rank in range(ranks)]
        for own, _ in pairs:
            own.settimeout(self.timeout)
        channels = [Channel(own) for own, _ in pairs]
        try:
            links = [other.fileno() for _, other in pairs]
            socket.send_fds(self._control, [json.dumps(requests).encode()], links)
            for _, other in pairs:
                other.close()
            self._answers(channels)
            cpu_seconds = -self._cpu_seconds()
            begin = time.perf_counter()
            for channel in channels:
                channel.send(go=go)
            ends = self._answers(channels)
            seconds = time.perf_counter() - begin
            cpu_seconds += self._cpu_seconds()
            evidence = self._answers(channels)
        except OSError as error:
            self.close()
            raise RunFailedError(f"{self._named} ended ({error}).{self._last_words()}") from error
        except RunFailedError:
            self._kill_descendants(wait_for=0.5)
            raise
        finally:
            for channel in channels:
                channel.close()
        modules = {name: found for each in evidence for name, found in each["modules"].items()}
        return RunResult(
            seconds=seconds,
            losses=[end["losses"] for end in ends],
            sums=ends[0]["sums"],
            evidence=evidence[0] | {"modules": modules},
            cpu_seconds=cpu_seconds,
            left_running=self._kill_descendants(wait_for=0.5),
        )

    def _place(self, rank: int, ranks: int, request: dict[str, Any]) -> dict[str, Any]:
        """Return what differs from rank to rank: what torchrun would say."""
        cuda = request["cell"]["device"] == "cuda"
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": request["port"],
        }
        return {
            "rank": rank,
            "ranks": ranks,
            "device": f"cuda:{rank}" if cuda else "cpu",
            "environment": {k: str(v) for k, v in environment.items()} if ranks > 1 else {},
            "root": str(self.tree.root),
            "paths": [str(path) for path in self.paths],
            "judge": str(PACKAGE_FOLDER.parent),
        }

    @property
    def _named(self) -> str:
        return f"The {self.tree.side} ({self.tree.label})"

    def _answers(self, channels: Sequence[Any]) -> list[dict[str, Any]]:
        """Return one answer of each rank."""
        answers = []
        for channel in channels:
            try:
                answer = channel.receive()
            except TimeoutError:
                raise RunFailedError(
                    f"{self._named} did not answer within {self.timeout:.0f} s.{self._last_words()}"
                ) from None
            except ValueError as error:
                raise RunFailedError(f"{self._named} sent no JSON ({error}).") from error
            if "failed" in answer:
                raise RunFailedError(
                    f"{self._named} failed: {answer['failed']}{self._linked(answer.get('lacks', ''))}"
                )
            if not answer:
                raise RunFailedError(
                    f"{self._named} ended early; its log is `{self.log}`.{self._last_words()}"
                )
            answers.append(answer)
        return answers

    def _linked(self, missing: str) -> str:
        """Return the option that shows a side the file that it lacks, where its source has it; else ""."""
        path = self.tree.root / missing
        if not missing or not path.is_relative_to(self.tree.root):
            return ""
        name = path.relative_to(self.tree.root)
        if not (self.tree.source / name).exists():
            return ""
        return f"; git does not track it: `--link {name.parts[0]}` shows it to both sides"

    def _cpu_seconds(self) -> float:
        """Return what the ranks and their children have spent so far."""
        assert self._server is not None
        spent = 0.0
        for process in _alive(self._server.pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                spent += times.user + times.system + times.children_user + times.children_system
        return spent

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["", *lines[-LAST_LINES:]])

    def _kill_descendants(self, wait_for: float = 0.0) -> int:
        """Kill what the server started and still runs; return how many processes that were."""
        if self._server is None or self._server.poll() is not None:
            return 0
        deadline = time.monotonic() + wait_for
        while (alive := _alive(self._server.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        return len(alive)


def _alive(pid: int) -> list[psutil.Process]:
    """Return the processes of a session that still run, its leader left out."""
    found = []
    for process in psutil.process_iter():
        try:
            is_own = process.pid != pid and os.getsid(process.pid) == pid
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


def interpreter(option: str, typed: str | None, tree: Tree) -> str:
    """Return the Python of a side: in its tree, on PATH, or that of this process.

    Raises:
        BadValueError: there is none.
    """
    if typed is None:
        return sys.executable
    inside = tree.root / typed
    found = str(inside) if inside.is_file() else shutil.which(typed)
    if not found:
        raise BadValueError(f"`{option} {typed}`: there is no such program.")
    return os.path.abspath(found)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
