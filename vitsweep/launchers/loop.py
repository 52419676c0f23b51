"""The loop of runs that a command and a job of Slurm share: each in fresh processes, each recorded."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from vitsweep.execution.code_hash import CellCode
from vitsweep.execution.run_request import Run, RunRequest
from vitsweep.execution.runner import Runner
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.spec.cell_spec import CellSpec

WARM_UP = "warm-up"
"""Purpose of a run that warms the machine up; what it measures is shown and discarded."""


class Cell(Protocol):
    """A cell of which runs are made."""

    @property
    def cell_id(self) -> str:
        """Its hash."""

    @property
    def spec(self) -> CellSpec:
        """What is measured."""

    @property
    def code(self) -> CellCode | None:
        """Its code when the runs were planned; None where any code may run."""


AnyCell = TypeVar("AnyCell", bound=Cell)


@dataclass(kw_only=True)
class RunLoop(Generic[AnyCell]):
    """Does runs one after the other, on what the executor of its runner holds.

    A subclass says what runs, and what ends it: `on_wait` of the runner raises `RunEnding`.

    Attributes:
        runner: makes the attempts and records them.
        records: that it added, oldest first.
        skipped: cells that ended by themselves without being measured, such as `out_of_memory`; they
            would end the same way in the next block.
        cut_short: what it lacked for the next run; "" where all runs were done.
    """

    runner: Runner
    records: list[RunRecord] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    cut_short: str = ""

    def run(self, coming: Iterable[tuple[Run, AnyCell]]) -> bool:
        """Do runs with their cells as they come; return whether the user stopped them.

        Raises:
            RunEnding: from `on_wait` of the runner.
        """
        for run, cell in coming:
            self.do(run, cell)
            if self.cut_short:
                break
        return False

    def do(self, run: Run, cell: AnyCell) -> None:
        """Do one run, unless something is lacking."""
        if cell.cell_id in self.skipped:
            self.leave_out(run)
            return
        self.cut_short = self.lacks(run, cell)
        if self.cut_short:
            return
        self.runner.on_wait()
        request = self.runner.request(run, cell.spec, self.number(run), cell.code)
        if run.purpose == WARM_UP:  # no record says that it ran, but a line of `attempts.jsonl`
            self.warm_up(request, cell)
            return
        record = self.attempt(request, cell)
        if record.status not in (Status.measured, *STOPPED_FROM_OUTSIDE):
            self.skipped.add(cell.cell_id)
        self.records.append(record)

    def leave_out(self, run: Run) -> None:
        """Called for a run of a cell that is skipped."""

    def lacks(self, run: Run, cell: AnyCell) -> str:
        """Say what is missing to begin a run: by default, nodes of the executor."""
        return self.runner.executor.lacks(cell.spec)

    def number(self, run: Run) -> int:
        """Return the number of an attempt at a run, from 1; 0 for the one after the latest."""
        return 0

    def warm_up(self, request: RunRequest, cell: AnyCell) -> RunRecord:
        """Warm the machine up."""
        return self.runner.warm_up(request, cell.spec)

    def attempt(self, request: RunRequest, cell: AnyCell) -> RunRecord:
        """Make an attempt at a run."""
        return self.runner.attempt(request, cell.spec)
