"""Runs one cell at a time on all nodes of a job."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitsweep.execution.calibration import calibrated, calibration_key
from vitsweep.execution.code_hash import Sources
from vitsweep.execution.run_request import RunRequest, earlier_folders, read_cell
from vitsweep.execution.supervisor import supervise, warm_up
from vitsweep.files import append_line, read_lines
from vitsweep.launchers.slurm.node.remote_ranks import Nodes, RemoteRanks
from vitsweep.launchers.slurm.node.transport import JobEnvironment
from vitsweep.launchers.slurm.state.jobs import Run
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec


@dataclass
class MultiNodeRunner:
    """Runs cells on the nodes of a job.

    Attributes:
        store: of the sweep; frozen cells are read from it, nothing else is.
        scratch: folder for what ranks leave beside their runs.
        env: of this process in the job.
        nodes: agents of the job.
        queued_s: seconds from submission to this start of the job.
        pair: whether baselines run beside their cells; a record says so where they do not.
        code: `git_commit` and `git_dirty` of the code when the job was submitted.
        measurements: cell id -> fields of `measurement` that belong to the submitting command.
    """

    store: Store
    scratch: Path
    env: JobEnvironment
    nodes: Nodes
    queued_s: float
    pair: bool
    code: Mapping[str, Any]
    measurements: Mapping[str, Mapping[str, Any]]
    _cells: dict[str, CellSpec] = field(default_factory=dict)
    _rates: dict[str, dict[str, float]] = field(default_factory=dict)
    _proved: dict[str, str] = field(default_factory=dict)

    def cell(self, cell_id: str) -> CellSpec:
        """Return a cell as it was frozen."""
        if cell_id not in self._cells:
            of_command = self.measurements.get(cell_id)
            self._cells[cell_id] = read_cell(self.store, cell_id, of_command)
            code = Sources().of(self._cells[cell_id])
            self.store.keep_code(code.hash, code.files)
            self._proved[cell_id] = earlier_proof(self.store, cell_id, code.hash)
        return self._cells[cell_id]

    def request(self, run: Run, attempt: int) -> RunRequest:
        """Return the request of an attempt, counted from 1, still without rendezvous and rates."""
        code_hash = Sources().of(self.cell(run.cell_id)).hash
        earlier = earlier_folders(self.store.cell(run.cell_id), run.name, attempt)
        return RunRequest(
            sweep_folder=self.store.root,
            cell_id=run.cell_id,
            run_id=run.run_id(attempt),
            block=run.block,
            position=run.position,
            attempt=attempt,
            init_method="",
            proved=self._proved[run.cell_id],
            earlier=earlier if self._was_begun_by(run, code_hash) else (),
            environment={
                **self.code,
                "launcher": "slurm",
                "slurm_job_id": self.env.shown_id,
                "queued_s": round(self.queued_s, 1),
                **({} if self.pair else {"paired": False}),
            },
        )

    def _was_begun_by(self, run: Run, code_hash: str) -> bool:
        """Tell whether the same code began a run, so that its saved training may go on."""
        events = read_lines(self.store.cell(run.cell_id) / "attempts.jsonl")
        starts = [e for e in events if e["event"] == "start" and e.get("name") == run.name]
        return all(start.get("code_hash") == code_hash for start in starts)

    def run(self, request: RunRequest) -> RunRecord:
        """Run it and return its record, which is on disk by then.

        Raises:
            JobEnding: the job must end; nothing is recorded.
            OSError: the record cannot be written.
        """
        cell = self.cell(request.cell_id)
        record = supervise(request, cell, self._start)
        if record.status == Status.measured:
            self._proved[request.cell_id] = str(record.validity.get("proved") or "")
        return record

    def warm_up(self, request: RunRequest) -> RunRecord:
        """Run it and discard what it measures.

        Raises:
            JobEnding: the job must end.
            OSError: nothing can be written.
        """
        cell = self.cell(request.cell_id)
        scratch = self.scratch / f"warm_up_{self.env.index}"
        record = warm_up(request, cell, scratch, self._start)
        if record.status == Status.measured:
            self._proved[request.cell_id] = str(record.validity.get("proved") or "")
        return record

    def rendezvous(self) -> str:
        """Return an `init_method` for the ranks of one run."""
        return self.nodes.rendezvous()

    def rates(self, cell_id: str) -> dict[str, float]:
        """Return matmul TFLOP/s by dtype and all-reduce GB/s on these nodes, measured once per job."""
        cell = self.cell(cell_id)
        key = calibration_key(cell, ",".join(self.env.nodes))
        if key not in self._rates:
            start = self._calibration_starter(cell_id)
            self._rates[key] = calibrated(cell, self.scratch, self.rendezvous(), start)
            line = {"key": key, "time": time.time(), "rates": self._rates[key]}
            append_line(self.store.root / "machine.jsonl", line)
        return self._rates[key]

    def _start(self, request: RunRequest, cell: CellSpec) -> RemoteRanks:
        order = {"do": "run", "cell_id": request.cell_id, "request": request.plain()}
        return RemoteRanks(self.nodes, request.run_id, cell.resources.ranks_per_node, order)

    def _calibration_starter(self, cell_id: str) -> Callable[..., RemoteRanks]:
        def start(cell: CellSpec, init_method: str, answer: Path) -> RemoteRanks:
            order = {
                "do": "calibrate",
                "cell_id": cell_id,
                "init_method": init_method,
                "answer": str(answer),
            }
            return RemoteRanks(self.nodes, answer.name, cell.resources.ranks_per_node, order)

        return start


def earlier_proof(store: Store, cell_id: str, code_hash: str) -> str:
    """Return how the equality of a cell was proved in an earlier run of the same code, or ""."""
    for path in sorted((store.cell(cell_id) / "runs").glob("*.json")):
        try:
            record = RunRecord.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        is_same = record.environment.get("code_hash") == code_hash
        if is_same and record.status == Status.measured and record.validity.get("proved"):
            return str(record.validity["proved"])
    return ""
