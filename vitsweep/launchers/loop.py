"""The loop of runs that a command and a job of Slurm share: each in fresh processes, each recorded."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitsweep.execution.run_request import Run, RunRequest
from vitsweep.execution.runner import Runner
from vitsweep.results.record import RunRecord

WARM_UP = "warm-up"
"""Purpose of a run that warms the machine up; what it measures is shown and discarded."""
Cell = TypeVar("Cell")
"""What a loop knows of a cell: a command its plan, a job its frozen settings."""


@dataclass(kw_only=True)
class RunLoop(ABC, Generic[Cell]):
    """Does runs one after the other, on what the executor of its runner holds.

    Attributes:
        runner: makes the attempts and records them; its `on_wait` ends a run, and with it the loop.
        cut_short: what it lacked for the next run; "" where all runs were done.
    """

    runner: Runner
    cut_short: str = ""

    def run(self, coming: Iterable[tuple[Run, Cell]]) -> bool:
        """Do runs with their cells as they come; return whether the user stopped them.

        Raises:
            RunEnding: from `on_wait` of the runner.
        """
        for run, cell in coming:
            self.do(run, cell)
            if self.cut_short:
                break
        return False

    def do(self, run: Run, cell: Cell) -> None:
        """Do one run, unless something is lacking."""
        self.cut_short = self.lacks(run, cell)
        if not self.cut_short:
            self.runner.on_wait()
            # no record says that a warm-up ran, but a line of `attempts.jsonl`
            does = self.warm_up if run.purpose == WARM_UP else self.attempt
            does(self.request(run, cell), cell)

    @abstractmethod
    def lacks(self, run: Run, cell: Cell) -> str:
        """Say what is missing to begin a run, such as nodes; "" where nothing is."""

    @abstractmethod
    def request(self, run: Run, cell: Cell) -> RunRequest:
        """Return the request of the next attempt at a run."""

    @abstractmethod
    def warm_up(self, request: RunRequest, cell: Cell) -> RunRecord:
        """Warm the machine up."""

    @abstractmethod
    def attempt(self, request: RunRequest, cell: Cell) -> RunRecord:
        """Make an attempt at a run, and note what it does."""
