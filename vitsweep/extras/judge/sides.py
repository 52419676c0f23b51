"""A side as the judge sees it: a fork server of the candidate, whose runs are timed from here."""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.code_hash import PACKAGE_FOLDER
from vitsweep.extras.judge.trees import SOURCE_ROOTS, Tree
from vitsweep.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor


RANK_FILE = Path(__file__).with_name("rank.py")
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
        from vitsweep.extras.judge.rank import Channel

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
        """Return one answer of each rank.

        Raises:
            RunFailedError: a rank failed, or did not answer in time.
            BadValueError: it has not the quality that was asked for.
        """
        answers = []
        for channel in channels:
            try:
                answer = channel.receive()
            except TimeoutError:
                raise RunFailedError(
                    f"{self._named} did not answer within {self.timeout:.0f} s.{self._last_words()}"
                ) from None
            except ValueError as error:
                raise RunFailedError(f"{self._named} must send JSON ({error}).") from error
            if "failed" in answer:
                raise RunFailedError(f"{self._named} failed: {answer['failed']}")
            if "lacks" in answer:
                known = " or ".join(f"`--quality {name}`" for name in answer["has"])
                raise BadValueError(
                    f"`--quality {answer['lacks']}`: what `make_step` of the {self.tree.side} returned has "
                    f"no `{answer['lacks']}(batch)`; use {known}."
                )
            if not answer:
                raise RunFailedError(
                    f"{self._named} ended early; its log is `{self.log}`.{self._last_words()}"
                )
            answers.append(answer)
        return answers

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


# What the judge checks from outside: whose files ran, whether both sides trained alike, what is possible.


LEAST_LOSS, LEAST_UPDATE, LEAST_NORM = 1e-5, 1e-3, 0.05
"""Relative differences of a loss, of a tensor's update and of its norm that are always allowed."""
CUSHION = 30.0
"""So many times the measured effect of rounding is allowed: another order of sums moves more values."""
LEAST_SHARE = 1e-2
"""A nearly vanishing update is measured by this share of a typical one."""
SHOWN = 3


class ForeignModuleError(VitsweepError):
    """A side imported a file of the project that is not its own."""


def own_modules(side: Side, other: Side, modules: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return path in the tree -> hash of each file of the project that a side imported.

    Raises:
        ForeignModuleError: a file of the project lies outside of the side's tree, as after
            `pip install -e .`, which shows one checkout to both sides.
    """
    root = side.tree.root.resolve()
    roots = [root / name for name in SOURCE_ROOTS] + [Path(path) for path in side.paths]
    source = side.tree.source.resolve()
    tops = {path.stem for folder in roots if folder.is_dir() for path in folder.iterdir()}
    found = {}
    for name, (path_text, digest) in modules.items():
        if not digest and name.partition(".")[0] not in tops:
            continue  # one of some thousand files of installed packages
        path = Path(path_text)
        if path.is_relative_to(root) and digest:
            found[str(path.relative_to(root))] = digest
            continue
        tail = Path(*name.split("."))
        is_project = any(
            (folder / tail).with_suffix(".py").exists() or (folder / tail / "__init__.py").exists()
            for folder in roots
        )
        is_judge = path.is_relative_to(PACKAGE_FOLDER) and not is_project
        of_source = bool(digest) and path.is_relative_to(source) and not is_judge
        if not (is_project or of_source):
            continue
        if _of_own_environment(path, side, other):
            found[f"{name} (installed)"] = digest
            continue
        raise ForeignModuleError(
            f"The {side.tree.side} ({side.tree.label}) imported `{name}` from `{path}`, which is outside of "
            f"its tree `{root}`: both sides would run the same file, as after `pip install -e .`. Name the "
            "folder that holds the package in the project (`--path src`), or give each side an environment: "
            "`--setup 'python -m venv .venv && .venv/bin/pip install .' --python-base .venv/bin/python "
            "--python-head .venv/bin/python`."
        )
    return found


def _of_own_environment(path: Path, side: Side, other: Side) -> bool:
    prefixes = [Path(each.python).parent.parent for each in (side, other)]
    return prefixes[0] != prefixes[1] and path.is_relative_to(prefixes[0].resolve())


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the judge has of one run: losses of rank 0..n by step, and the weights at both ends."""

    losses: list[list[float]]
    start: "Mapping[str, Tensor]"
    end: "Mapping[str, Tensor]"


def training_of(result: RunResult, path: Path) -> Training:
    """Read and remove the weights of a run.

    Raises:
        WrongEvidenceError: they are not those whose checksum ended the window.
    """
    import torch

    from vitsweep.extras.judge.rank import checksum

    found = []
    for file in (path.with_name(f"{path.name}.start"), path):
        found.append(torch.load(file, weights_only=True))
        file.unlink()
    sums = {name: checksum(tensor) for name, tensor in found[1].items()}
    if sums != result.sums:
        raise WrongEvidenceError(
            "the weights changed after their checksum had ended the window: work was left running"
        )
    return Training(losses=result.losses, start=found[0], end=found[1])


class WrongEvidenceError(Exception):
    """The head does not train as the base does; the text says in what."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What rounding explains, measured on a base whose weights and inputs were changed by one unit.

    Attributes:
        losses: by step, relative.
        updates: by tensor, relative to its update.
        norms: by tensor, of the norm of its update.
        steps: of the window.
    """

    losses: list[float]
    updates: dict[str, float]
    norms: dict[str, float]
    steps: int

    @classmethod
    def between(cls, base: Training, perturbed: Training) -> "Bounds":
        """Measure them."""
        worst, losses = 0.0, []
        for found, wanted in zip(_by_step(perturbed), _by_step(base), strict=True):
            worst = max(worst, _relative(found, wanted))
            losses.append(max(LEAST_LOSS, CUSHION * worst))
        apart = differences(perturbed, base)
        return cls(
            losses=losses,
            updates={n: max(LEAST_UPDATE, CUSHION * d) for n, (d, _) in apart.items()},
            norms={n: max(LEAST_NORM, CUSHION * d) for n, (_, d) in apart.items()},
            steps=len(losses),
        )

    @property
    def of_updates(self) -> float:
        """The bound of a typical tensor's update: the median over tensors."""
        return statistics.median(self.updates.values())

    @property
    def sentence(self) -> str:
        """What was compared, in words."""
        loose = sum(bound > 1 for bound in self.updates.values())
        text = (
            f"losses of {self.steps} timed steps within {self.losses[0]:.0e} (first) to "
            f"{self.losses[-1]:.0e} (last), updates of {len(self.updates)} tensors"
        )
        if loose:
            text += f"; of {loose} of them rounding alone changes the direction, so their norms were compared"
        return text

    def require_equal(self, head: Training, base: Training) -> None:
        """Compare losses and updates.

        Raises:
            WrongEvidenceError: they differ by more than rounding explains.
        """
        for step, (found, wanted) in enumerate(zip(_by_step(head), _by_step(base), strict=True)):
            if not _relative(found, wanted) <= self.losses[step]:
                raise WrongEvidenceError(
                    f"the loss of timed step {step + 1} is {found[0]:.6g} instead of {wanted[0]:.6g} "
                    f"(rounding explains {self.losses[step]:.0e} of it)"
                )
        if {n: t.shape for n, t in head.end.items()} != {n: t.shape for n, t in base.end.items()}:
            raise WrongEvidenceError(
                "its weights have other names or shapes, so that they cannot be compared: "
                "`--quality loss` judges another model"
            )
        far = [
            f"`{name}` ({apart:.1e} of its update, rounding explains {self.updates[name]:.0e})"
            for name, (apart, of_norm) in differences(head, base).items()
            if not (apart <= self.updates[name] and of_norm <= self.norms[name])
        ]
        if far:
            more = f" and {len(far) - SHOWN} more" if len(far) > SHOWN else ""
            raise WrongEvidenceError(
                f"after {self.steps} steps weights differ: {', '.join(far[:SHOWN])}{more}"
            )


def _by_step(training: Training) -> list[list[float]]:
    """Return the losses of all ranks, step by step."""
    return [list(step) for step in zip(*training.losses, strict=True)]


def _relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest relative difference; inf where a value is not finite."""
    if not all(isfinite(value) for value in (*found, *wanted)):
        return inf
    return max(abs(f - w) / (abs(w) or 1.0) for f, w in zip(found, wanted, strict=True))


def differences(found: Training, wanted: Training) -> dict[str, tuple[float, float]]:
    """Return by tensor how far two updates from the base's first weights differ, and their norms.

    Both are relative to the norm of the wanted update, or to a share of a typical one.
    """
    updates = {n: (t.double() - wanted.start[n].double()) for n, t in wanted.end.items()}
    norms = {n: float(t.norm()) for n, t in updates.items()}
    known = [norm for norm in norms.values() if isfinite(norm)]
    typical = (sum(norm**2 for norm in known) / max(len(known), 1)) ** 0.5
    result = {}
    for name, update in updates.items():
        size = max(norms[name], LEAST_SHARE * typical) or 1.0
        own = found.end[name].double() - wanted.start[name].double()
        apart, of_norm = float((own - update).norm()), abs(float(own.norm()) - norms[name])
        result[name] = tuple(d / size if isfinite(d) else inf for d in (apart, of_norm))
    return result  # type: ignore[return-value]


def restored(path: Path, entries: Sequence[Mapping[str, Any]]) -> bool:
    """Write JSON lines anew where a candidate changed them, which its user may; return whether it did."""
    own = [json.dumps(entry) for entry in entries]
    with suppress(OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        if [json.dumps(json.loads(line)) for line in lines] == own:
            return False
    write_atomically(path, "".join(f"{line}\n" for line in own))
    return True


def require_finite(base: Training) -> None:
    """Refuse a base that diverges: nothing can be compared with it.

    Raises:
        VitsweepError: one of its losses is not finite.
    """
    if not all(isfinite(loss) for losses in base.losses for loss in losses):
        raise VitsweepError("The `loss` of the base is not finite: judge against another one.")
