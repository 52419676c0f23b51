"""Runs of cells, one attempt after the other, on this machine or on the nodes of a job."""

import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import attempts
from vitsweep.execution.calibration import calibration_for
from vitsweep.execution.code_hash import MOST_FILES, CellCode, Sources, changed_files
from vitsweep.execution.rank_processes import Ranks, rendezvous
from vitsweep.execution.run_request import Run, RunRequest, earlier_folders, request_for
from vitsweep.execution.supervisor import start_local_ranks, supervise, warm_up
from vitsweep.results.record import LOOK, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec


class Place(Protocol):
    """Where the ranks of runs are started."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Columns of every record that is made here: launcher, git state, queue time."""

    @property
    def scratch(self) -> Path:
        """Folder that does not exist, on all nodes the same, for a run whose record is discarded."""

    def start(self, request: RunRequest, cell: CellSpec) -> Ranks:
        """Start all ranks of a run."""

    def rendezvous(self) -> AbstractContextManager[str]:
        """Hold an `init_method` for the ranks of one run."""

    def rates(self, cell: CellSpec, on_wait: Callable[[], None]) -> dict[str, float]:
        """Return the rates that the cell's ranks reach here, see `execution.calibration`."""


@dataclass(frozen=True)
class LocalPlace:
    """This machine.

    Attributes:
        store: of the sweep.
        facts: columns of every record.
    """

    store: Store
    facts: Mapping[str, Any]

    @property
    def scratch(self) -> Path:
        """A folder beside the temporary files of this machine."""
        return Path(tempfile.mkdtemp(prefix="vitsweep-warm-up-"))

    def start(self, request: RunRequest, cell: CellSpec) -> Ranks:
        """Start all ranks as processes of this machine."""
        return start_local_ranks(request, cell)

    def rendezvous(self) -> AbstractContextManager[str]:
        """Hold a file in which the ranks meet."""
        return rendezvous()

    def rates(self, cell: CellSpec, on_wait: Callable[[], None]) -> dict[str, float]:
        """Return the rates of this machine, measured at most an hour ago."""
        return calibration_for(cell, self.store.root, socket.gethostname(), on_wait)


@dataclass
class Runner:
    """Runs cells of one sweep in one place.

    Attributes:
        store: where the records go.
        place: where the ranks start.
        on_wait: called about five times a second while ranks run; may raise `RunEnding`.
    """

    store: Store
    place: Place
    on_wait: Callable[[], None] = lambda: None
    _proved: dict[str, str] = field(default_factory=dict)
    _proved_exactly: set[str] = field(default_factory=set)

    def request(
        self, run: Run, cell: CellSpec, attempt: int = 1, planned: CellCode | None = None
    ) -> RunRequest:
        """Return the request of an attempt, still without rendezvous and rates.

        A training goes on with what earlier attempts have saved if the same code began them all.

        Args:
            run: the run.
            cell: its cell.
            attempt: from 1.
            planned: code of the cell as the command found it; None where any code may run.

        Raises:
            VitsweepError: the code was edited since it was planned.
        """
        code = Sources().of(cell)
        if planned is not None and planned.hash != code.hash:
            raise _edited(changed_files(planned.files, code.files))
        self.store.keep_code(code.hash, code.files)
        begun = [a for a in attempts(self.store, run.cell_id) if a.run.name == run.name]
        same_code = all(begin.code_hash == code.hash for begin in begun)
        return request_for(
            self.store,
            run,
            attempt,
            proved=self.proof(run.cell_id, code.hash),
            proved_exactly=cell.id_without("precision") in self._proved_exactly,
            earlier=earlier_folders(self.store, run, attempt) if same_code else (),
            environment={**self.place.facts, **run.facts},
        )

    def attempt(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        """Make an attempt at a run, or at a look, and return its record, which is on disk by then.

        Raises:
            RunEnding: from `on_wait`; nothing is recorded unless all ranks had just finished.
            OSError: the record cannot be written (a full disk).
        """
        if request.environment.get("purpose") == LOOK:
            cell = replace(cell, measurement=cell.measurement.of_look())
        return self._supervised(request, cell, supervise)

    def warm_up(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        """Run a cell once and discard what it measures; a line of `attempts.jsonl` says so.

        It has a run id of its own: a late report about it must not be taken for one about the run.

        Raises:
            RunEnding: from `on_wait`.
            OSError: nothing can be written (a full disk).
        """
        request = replace(request, run_id=f"{request.run_id}-warm-up")
        return self._supervised(request, cell, partial(warm_up, scratch=self.place.scratch))

    def _supervised(
        self, request: RunRequest, cell: CellSpec, run: Callable[..., RunRecord]
    ) -> RunRecord:
        rates = self.place.rates(cell, self.on_wait)
        with self.place.rendezvous() as init_method:
            request = replace(request, calibration=rates, init_method=init_method)
            record = run(request, cell, start=self.place.start, on_wait=self.on_wait)
        if record.status == Status.measured:
            proved = self._proved[request.cell_id] = str(record.validity.get("proved") or "")
            if proved:
                self._proved_exactly.add(cell.id_without("precision"))
        return record

    def proof(self, cell_id: str, code_hash: str) -> str:
        """Return how the equality of a cell was proved in an earlier run of the same code, or ""."""
        if cell_id not in self._proved:
            self._proved[cell_id] = _earlier_proof(self.store, cell_id, code_hash)
        return self._proved[cell_id]


def _edited(files: Sequence[str]) -> VitsweepError:
    return VitsweepError(
        f"The code was edited while the command runs ({', '.join(files[:MOST_FILES])}). What was measured "
        "is kept: the same command goes on with the code as it is then."
    )


def _earlier_proof(store: Store, cell_id: str, code_hash: str) -> str:
    try:
        found = [
            str(run.validity["proved"])
            for run in store.runs(cell_id)
            if run.status == Status.measured
            and run.validity.get("proved")
            and run.environment.get("code_hash") == code_hash
        ]
    except VitsweepError:  # of a later version than this job runs
        return ""
    return found[-1] if found else ""
