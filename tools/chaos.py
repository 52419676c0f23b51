"""Random faults on a sweep while it runs, and what must be true of it afterwards.

Tests of the launchers and `benchmarks/soak.py` use it. Only processes whose working directory is the
folder of the sweep are signalled, and no file of the sweep is touched.
"""

import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from tests.command import Command
from vitsweep.foreign import read_lines
from vitsweep.launchers.slurm.submit.sbatch import AGENT
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, Status

DONE = "Everything that was asked for is measured already"
MOST_COMMANDS = 5
"""So often is the same command typed after the faults until nothing is missing."""
SECONDS_STOPPED = 10.0
SECONDS_OF_A_COMMAND = 1800.0
AGENT_OF_ALLOCATION = " vitsweep agent "
"""Module and verb of an agent that no job of Slurm starts."""
FORK_SERVER = "multiprocessing.forkserver"
Left = TypeVar("Left")


class Chaos:
    """Faults that strike the processes of one sweep on this machine.

    Args:
        vitsweep: the command line, in a folder that nothing else uses.
        asked: the command of the sweep; each cell is measured in one block.
        num_cells: cells that it has.
        seed: of the faults.

    Attributes:
        struck: how often each fault has struck.
        records: run record -> its content when it was first seen.
        next_environment: variables for the next command alone.
    """

    def __init__(self, vitsweep: Command, asked: tuple[str, ...], num_cells: int, seed: int):
        self.vitsweep, self.asked, self.num_cells = vitsweep, asked, num_cells
        self.dice = random.Random(seed)
        self.struck: Counter[str] = Counter()
        self.records: dict[Path, bytes] = {}
        self.next_environment: dict[str, str] = {}
        self._stopped: list[tuple[float, psutil.Process]] = []
        self._commands: list[subprocess.Popen[str]] = []
        self._readers_that_failed: list[str] = []

    @property
    def faults(self) -> Mapping[str, Callable[[], bool]]:
        """Return the faults by name; each returns whether it found something to strike."""
        return {
            "kill rank": lambda: self.send(signal.SIGKILL, "rank"),
            "kill fork server": lambda: self.send(signal.SIGKILL, "fork server"),
            "kill command": lambda: self.send(signal.SIGKILL, "command"),
            "interrupt command": lambda: self.send(signal.SIGINT, "command"),
            "stop rank": lambda: self.stop("rank"),
            "second command": self._start_a_second_command,
            "status": lambda: self.read("status"),
            "collect": lambda: self.read("collect"),
        }

    def check(self, seconds: float) -> None:
        """Strike the sweep, let the same command finish it, and fail where anything was lost."""
        try:
            self.run(seconds)
            self.recover()
            assert self.losses() == [], self.struck
        finally:
            self.close()

    def run(self, seconds: float, pause: tuple[float, float] = (2.0, 5.0)) -> None:
        """Start the sweep and strike it until time is over, or all its cells are measured.

        Args:
            seconds: of faults.
            pause: least and most seconds between two of them.
        """
        end = time.monotonic() + seconds
        self.start()
        while time.monotonic() < end and not self._is_done():
            time.sleep(self.dice.uniform(*pause))
            self._continue_stopped(time.monotonic())
            name = self.dice.choice(sorted(self.faults))
            with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it had just ended
                self.struck[name] += self.faults[name]()
            self.look()
            if all(command.poll() is not None for command in self._commands):
                self.start()
        self.calm()
        for command in self._commands:
            command.wait(SECONDS_OF_A_COMMAND)

    def calm(self) -> None:
        """Undo what does not end by itself."""
        self._continue_stopped(float("inf"))

    def recover(self) -> int:
        """Type the same command until nothing is missing; return how often.

        Raises:
            AssertionError: too often.
        """
        for number in range(1, MOST_COMMANDS + 1):
            said = self._said(self.start())
            if DONE in said:
                return number
            if "ended otherwise and are not repeated" in said:
                again = ("retry", "--status", "failed,killed,timed_out,preempted")
                self._said(self.start(*again, quick=False))
        raise AssertionError(f"not complete after {MOST_COMMANDS} commands:\n{said}")

    def losses(self) -> list[str]:
        """Return what was lost, doubled, changed or left behind: nothing should be."""
        self.vitsweep("collect", quick=False)
        cells, runs = self.vitsweep.cells(), list(self.vitsweep.store.runs())
        found = list(self._readers_that_failed)
        rows = Counter(cells["cell_id"])
        if len(rows) != self.num_cells or set(rows.values()) != {1}:
            found.append(f"{len(cells)} rows for {self.num_cells} cells")
        if any(cells["status"] != Status.measured):
            found.append(f"rows: {cells['status'].value_counts().to_dict()}")
        for run in runs:
            if run.status not in (Status.measured, *STOPPED_FROM_OUTSIDE):
                found.append(f"{run.run_id} of a sound cell is {run.status}: {run.reason}")
        measured = Counter(run.cell_id for run in runs if run.status == Status.measured)
        if extra := {cell: count for cell, count in measured.items() if count > 1}:
            found.append(f"measured beyond need: {extra}")
        well = self._ended_well()
        thrown_away = [r.run_id for r in runs if r.status != Status.measured and r.run_id in well]
        if thrown_away:
            found.append(f"measurements thrown away: {thrown_away}")
        changed = [p.name for p, text in self.records.items() if _content(p) != text]
        if changed:
            found.append(f"records that changed: {changed}")
        if left := left_after(60, self._processes):
            found.append(f"processes left: {list(map(str, left))}")
        return found

    def close(self) -> None:
        """Let nothing survive, whatever happened."""
        self.calm()
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()

    def start(self, *arguments: str, quick: bool = True) -> "subprocess.Popen[str]":
        """Start a command, of the sweep where no other is given."""
        log = self.vitsweep.folder / f"command{len(self._commands)}.log"
        words = arguments or self.asked
        command = self.vitsweep.start(*words, quick=quick, log=log, more=self.next_environment)
        self.next_environment = {}
        self._commands.append(command)
        return command

    def send(self, number: signal.Signals, kind: str) -> bool:
        """Send a signal to one process of a kind."""
        process = self.one_of(kind)
        if process is not None:
            process.send_signal(number)
        return process is not None

    def stop(self, kind: str) -> bool:
        """Stop one process of a kind; it goes on some seconds later."""
        process = self.one_of(kind)
        if process is not None:
            process.send_signal(signal.SIGSTOP)
            self._stopped.append((time.monotonic() + SECONDS_STOPPED, process))
        return process is not None

    def read(self, verb: str) -> bool:
        """Look at the sweep as another terminal does."""
        self.check_reader(verb, self.vitsweep(verb, quick=False))
        return True

    def check_reader(self, verb: str, done: "subprocess.CompletedProcess[str]") -> None:
        """Note a reading command that ended in a traceback or with an unknown exit code."""
        if done.returncode not in (0, 2, 3) or "Traceback" in done.stderr:
            self._readers_that_failed.append(f"{verb}: {done.returncode} {done.stderr[-500:]}")

    def one_of(self, kind: str) -> psutil.Process | None:
        """Return a process of the sweep, or None where there is none of this kind."""
        found = self._by_kind()[kind]
        return self.dice.choice(sorted(found, key=lambda p: p.pid)) if found else None

    def look(self) -> None:
        """Read records that are new; they must stay as they are."""
        for path in self.vitsweep.store.cells.glob("*/runs/*.json"):
            if path not in self.records:
                self.records[path] = path.read_bytes()

    def _is_done(self) -> bool:
        """Whether a command found nothing left to do."""
        return any(c.poll() == 0 and DONE in self._said(c) for c in self._commands)

    def _said(self, command: "subprocess.Popen[str]") -> str:
        command.wait(SECONDS_OF_A_COMMAND)
        log = self.vitsweep.folder / f"command{self._commands.index(command)}.log"
        text = log.read_text(errors="replace")
        if "Traceback" in text:
            self._readers_that_failed.append(text[-500:])
        return text

    def _continue_stopped(self, now: float) -> None:
        for until, process in list(self._stopped):
            if now > until:
                self._stopped.remove((until, process))
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def _start_a_second_command(self) -> bool:
        if len(self._by_kind()["command"]) > 1:
            return False
        self.start()
        return True

    def _processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if runs_in(p, self.vitsweep.folder)]

    def _by_kind(self) -> Mapping[str, list[psutil.Process]]:
        lines = {}
        for process in self._processes():
            with suppress(psutil.Error):
                lines[process] = (process.ppid(), " ".join(process.cmdline()))
        of_pid = {process.pid: line for process, (_, line) in lines.items()}
        found = defaultdict(list)
        for process, (parent, line) in lines.items():
            if FORK_SERVER in line:
                is_rank = parent == 1 or FORK_SERVER in of_pid.get(parent, "")
                found["rank" if is_rank else "fork server"].append(process)
            elif "srun" in line or "bash" in line:
                continue
            elif AGENT in line:
                above = of_pid.get(parent, "")
                is_agent = AGENT in above and "srun" not in above
                found["agent" if is_agent else "coordinator"].append(process)
            elif AGENT_OF_ALLOCATION in line:
                found["agent"].append(process)
            elif " -m vitsweep -m " in line:
                found["command"].append(process)
        return found

    def _ended_well(self) -> set[str]:
        """Return the runs all of whose ranks ended with exit code 0."""
        events = self.vitsweep.store.cells.glob("*/attempts.jsonl")
        return {
            event["run_id"]
            for path in events
            for event in read_lines(path)
            if event["event"] == "end" and set(event["exit_codes"]) == {0}
        }


def left_after(seconds: float, find: Callable[[], list[Left]]) -> list[Left]:
    """Return what is still there after some seconds, or at once where nothing is."""
    deadline = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def runs_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process that still lives is of the sweep in a folder."""
    try:
        return Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
