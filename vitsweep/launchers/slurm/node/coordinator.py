"""The coordinator of a job, on its first node: decides which run is next, on all nodes, and writes events."""

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitsweep.errors import STORAGE_ERRNOS, VitsweepError
from vitsweep.execution.attempts import record_left
from vitsweep.execution.code_hash import PACKAGE_FOLDER
from vitsweep.execution.outcome import RunFailure, publish
from vitsweep.execution.run_request import Run, RunRequest, needs_warm_up, read_cell
from vitsweep.execution.runner import Runner
from vitsweep.files import SweepGoneError, append_line
from vitsweep.launchers.loop import WARM_UP, RunLoop
from vitsweep.launchers.nodes.transport import (
    LOOPBACK,
    SECONDS_TO_CONNECT,
    SHORT_KILL_TIMEOUT_SECONDS,
    AgentListener,
    Nodes,
)
from vitsweep.launchers.slurm.node.signals import JobEnding, Signals, requeue
from vitsweep.launchers.slurm.state.jobs import (
    CAUSE_CANCELLED,
    CAUSE_DONE,
    CAUSE_REQUEUED,
    ArrayJob,
    JobArray,
    cells_submitted_since,
)
from vitsweep.planning.freeze import code_state
from vitsweep.results.record import RunRecord, Status
from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Job, restart and node of this process, as `slurm_task` reads them.

    Attributes:
        job_id: id of this job; every job of an array has its own.
        array_id: id of the array.
        index: of the job in the array.
        restart: how often Slurm has started the job before.
        node_index: of this node in the job; 0 runs the coordinator.
        nodes: names of all nodes, by node index.
        launch_address: IP address of the node that started the step, which is the first one.
    """

    job_id: str
    array_id: str
    index: int
    restart: int
    node_index: int
    nodes: tuple[str, ...]
    launch_address: str | None

    @property
    def shown_id(self) -> str:
        """The job's id as Slurm's tools show it, such as `123_4`."""
        return f"{self.array_id}_{self.index}"

    @property
    def addresses(self) -> list[str]:
        """Addresses to try for the first node, best first; its name need not resolve.

        A job of one node does not leave the node.
        """
        known = [self.nodes[0], self.launch_address] if len(self.nodes) > 1 else [LOOPBACK]
        return list(dict.fromkeys(filter(None, known)))

    def key(self, secret: str) -> bytes:
        """Return the key with which agents of this start of this job authenticate.

        Args:
            secret: of the job array.
        """
        return f"{secret}.{self.job_id}.{self.restart}".encode()


def code_that_runs(sweep: Path, of_submission: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `git_commit` and `git_dirty` of the code that this process has imported.

    Args:
        sweep: whose folder may hold a copy of the code, in no repository of its own.
        of_submission: the same when the job was submitted, for such a copy and where git is missing.
    """
    if PACKAGE_FOLDER.is_relative_to(sweep.absolute()):
        return of_submission
    state = code_state()
    return (
        {key: state[key] for key in ("git_commit", "git_dirty")}
        if state["git_commit"]
        else of_submission
    )


# Writes the events of a job: the coordinator does, and nobody else while the job is alive.


HEARTBEAT_SECONDS = 30.0


class JobEventWriter:
    """Writes events, and knows which runs need no further attempt.

    Args:
        job: the job.
        restart: how often Slurm has started it before.

    Attributes:
        earlier: events of earlier starts of the job.
        final_statuses: run -> status, of the runs that will not be repeated.
    """

    def __init__(self, job: ArrayJob, restart: int) -> None:
        self.job, self.restart = job, restart
        self.earlier = job.events()
        self._taken_over: set[str] = set()
        self.final_statuses = self.earlier.final_statuses()
        self._written_at = 0.0

    @property
    def remaining_runs(self) -> list[Run]:
        """Runs that are still to be done, in order."""
        events = self.job.events()
        return self.job.remaining_runs(events, self.final_statuses, self._taken_over)

    @property
    def all_measured(self) -> bool:
        """Whether every run that ended was measured."""
        return set(self.final_statuses.values()) <= {str(Status.measured)}

    @property
    def newer_restart(self) -> int | None:
        """Number of a later start of the same job, which means that Slurm takes this one for dead."""
        last = self.job.events().last_start
        return last["restart"] if last and last["restart"] > self.restart else None

    def write(self, event: str, **facts: Any) -> None:
        """Append an event."""
        line = {"event": event, "time": time.time(), "restart": self.restart}
        append_line(self.job.events_path, line | facts)
        self._written_at = time.monotonic()

    def heartbeat(self) -> None:
        """Show that the job is alive, where no other event has for a while."""
        if time.monotonic() > self._written_at + HEARTBEAT_SECONDS:
            self.write("heartbeat")

    def leave_to_other_jobs(self, cells: Collection[str]) -> None:
        """Do no further run of some cells, neither in this start of the job nor in a later one."""
        self._taken_over |= set(cells)
        self.write("taken_over", cells=sorted(cells))

    def run_ended(
        self,
        request: RunRequest,
        record: RunRecord,
        will_repeat: bool = False,
        saved_step: int | None = None,
    ) -> None:
        """Write how an attempt of a run ended.

        Args:
            request: the attempt.
            record: of the attempt.
            will_repeat: whether a later start of the job repeats it, or continues its training.
            saved_step: steps after which its training is saved, or None.
        """
        if not will_repeat:
            self.final_statuses[request.name] = str(record.status)
        self.write(
            "run_end",
            run=request.name,
            block=request.block,
            cell_id=request.cell_id,
            run_id=record.run_id,
            status=str(record.status),
            reason=record.reason,
            images_per_second=record.metrics.get("images_per_second"),
            will_repeat=will_repeat,
            saved_step=saved_step,
        )


SECONDS_TO_BE_REQUEUED = 180
ALL_MEASURED, NOT_ALL_MEASURED, NOT_STARTED, INTERRUPTED = 0, 3, 4, 5
"""Exit codes of a job."""


def refuse(env: JobEnvironment, array: JobArray, reason: str) -> None:
    """Write that a job does not start."""
    event_log = JobEventWriter(ArrayJob(array, env.index, {}), env.restart)
    event_log.write("job_end", cause="not started", reason=reason, exit_code=NOT_STARTED)


def coordinate(env: JobEnvironment, job: ArrayJob, key: bytes) -> int:
    """Do the work of a job; return its exit code, which Slurm keeps even where the disk is full."""
    try:
        coordinator = Coordinator(env, job, key)
        try:
            coordinator.run_all()
        except JobEnding as ending:
            return coordinator.interrupt(ending)
        except VitsweepError as error:
            return coordinator.end(NOT_STARTED, "not started", str(error))
        measured = coordinator.event_log.all_measured
        return coordinator.end(ALL_MEASURED if measured else NOT_ALL_MEASURED, CAUSE_DONE)
    except SweepGoneError as error:
        print(error, file=sys.stderr)
        return NOT_STARTED
    except OSError as error:
        if error.errno not in STORAGE_ERRNOS:
            raise
        print(f"{error}: nothing more can be written.", file=sys.stderr)
        return int(error.errno or 1)


@dataclass(kw_only=True)
class JobLoop(RunLoop[CellSpec]):
    """The loop of a job: writes an event as each run starts and ends; any code may run.

    Attributes:
        job: with the runs to be done.
        event_log: of this start of the job.
        nodes: all nodes of the job.
        num_started_runs: how many runs this start of the job has begun.
        cells: that were read, by id.
    """

    job: ArrayJob
    event_log: JobEventWriter
    nodes: Nodes
    num_started_runs: int = 0
    cells: dict[str, CellSpec] = field(default_factory=dict)

    def coming(self) -> Iterator[tuple[Run, CellSpec]]:
        """Yield the remaining runs; before the first block of several cells, its first one as a warm-up.

        A start of the job that ended during its warm-up is followed by one without: a job whose time is
        too short for both would never do its runs.

        Raises:
            JobEnding: Slurm has started the job again.
        """
        earlier, remaining = self.event_log.earlier, self.event_log.remaining_runs
        block = [self.cell(run.cell_id) for run in remaining if run.block == remaining[0].block]
        if needs_warm_up(block) and not earlier.ended_in_warm_up:
            yield replace(remaining[0], purpose=WARM_UP), block[0]
        while remaining := self.event_log.remaining_runs:
            if restart := self.event_log.newer_restart:
                reason = f"Slurm has started the job again (restart {restart})."
                raise JobEnding(Status.killed, reason, requeue=False, cause="replaced")
            run, cell = remaining[0], self.cell(remaining[0].cell_id)
            without_progress = earlier.num_attempts(run) - earlier.num_saved_attempts(run)
            if without_progress < self.job.array.facts["max_attempts"]:
                yield run, cell
                continue
            reason = f"It was interrupted {without_progress} times (`hydra.launcher.max_attempts`)."
            request = self.request(run, cell)
            record = publish(request, cell, RunFailure(Status.killed, reason))
            self.event_log.run_ended(request, record)

    def cell(self, cell_id: str) -> CellSpec:
        """Return a cell of the job as it was frozen, with the settings of the submitting command."""
        if cell_id not in self.cells:
            of_command = self.job.of_command(cell_id)
            self.cells[cell_id] = read_cell(self.runner.store, cell_id, of_command)
        return self.cells[cell_id]

    def lacks(self, run: Run, cell: CellSpec) -> str:
        """Say which nodes are gone."""
        return self.runner.executor.lacks(cell)

    def request(self, run: Run, cell: CellSpec) -> RunRequest:
        """Return the request of the attempt after those that the job has noted."""
        return self.runner.request(run, cell, self.event_log.earlier.num_attempts(run) + 1)

    def warm_up(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        """Warm the nodes up."""
        self.event_log.write("warm_up_start", cell_id=request.cell_id)
        record = self.runner.warm_up(request, cell)
        self.event_log.write("warm_up_end", cell_id=request.cell_id, status=str(record.status))
        return record

    def attempt(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        """Make an attempt at a run, which is repeated if a node is lost before it is measured."""
        names = {"run": request.name, "cell_id": request.cell_id, "run_id": request.run_id}
        self.event_log.write("run_start", **names)
        self.num_started_runs += 1
        try:
            record = self.runner.attempt(request, cell)
        except JobEnding as ending:
            self._record_interrupted(request, cell, ending)
            raise
        is_lost = bool(self.nodes.lost) and record.status != Status.measured
        self.event_log.run_ended(request, record, will_repeat=is_lost)
        return record

    def _record_interrupted(self, request: RunRequest, cell: CellSpec, ending: JobEnding) -> None:
        """Record the run in flight when the job must end.

        A run that had the whole time of the job to itself and saved nothing would time out again.
        """
        step, reason = ending.saved_step, ending.reason
        if step is not None:
            reason += f" Its training is saved after {step} steps and continues from there."
        record = publish(request, cell, RunFailure(ending.status, reason))
        had_all_time = ending.status == Status.timed_out and self.num_started_runs == 1
        is_final = record.status == Status.measured or (had_all_time and step is None)
        may_restart = ending.requeue or ending.cause == CAUSE_CANCELLED  # somebody may requeue it
        will_repeat = may_restart and not is_final
        self.event_log.run_ended(request, record, will_repeat=will_repeat, saved_step=step)

    def leave_cells_taken_over(self) -> None:
        """Do not measure again what was submitted anew while this job was taken for dead.

        Slurm starts a job again that it had listed as failed where an operator requeues it, or where
        its controller comes back with an older state.
        """
        own = {run.cell_id for run in self.event_log.remaining_runs}
        given_up_at = self.event_log.earlier.reconciled_at
        if cells := own & cells_submitted_since(self.runner.store, given_up_at):
            self.event_log.leave_to_other_jobs(cells)

    def record_orphan(self) -> None:
        """Record the run that an earlier start left in flight, so that nothing records it later."""
        in_flight = self.event_log.earlier.in_flight or {"run": None}
        for run in self.event_log.remaining_runs:
            if run.name == in_flight["run"]:
                cell, attempt = self.cell(run.cell_id), self.event_log.earlier.num_attempts(run)
                reason = "Its job died without reporting an end and was started again."
                failure = RunFailure(Status.killed, reason)
                request = self.runner.request(run, cell, attempt)
                record = record_left(request, cell, failure, suffix="")
                will_repeat = record.status == Status.killed
                self.event_log.run_ended(request, record, will_repeat=will_repeat)


class Coordinator:
    """Starts and ends a job.

    Args:
        env: of this process.
        job: with the runs to be done.
        key: with which its agents authenticate.
    """

    def __init__(self, env: JobEnvironment, job: ArrayJob, key: bytes) -> None:
        self._key = key
        self.env, self.facts, self._job = env, job.array.facts, job
        self.event_log = JobEventWriter(job, env.restart)
        self._started_at = time.time()
        self._nodes: Nodes | None = None
        limit_s, delay_s = self.facts["request"]["minutes"] * 60, self.facts["signal_delay_s"]
        self.signals = Signals(
            env.job_id, env.shown_id, time.monotonic(), limit_s, delay_s, env.restart
        )

    def run_all(self) -> None:
        """Write that the job has started, wait for the agents of all nodes, and do the remaining runs.

        Raises:
            JobEnding: the job must end before they are done.
            VitsweepError: an agent does not connect.
        """
        self.signals.install_handlers()
        env, store = self.env, self._job.store()
        ids = {"job_id": env.job_id, "array_id": env.array_id}
        self.event_log.write("job_start", **ids, nodes=list(env.nodes))
        agents = AgentListener(env.nodes, env.addresses, self._key).accept_agents(
            SECONDS_TO_CONNECT
        )
        scratch = self._job.array.folder / f"warm_up_{env.index}"
        nodes = self._nodes = Nodes(agents, scratch, self._columns(store.root))
        runner = Runner(store, nodes, self._on_wait)
        loop = JobLoop(runner=runner, job=self._job, event_log=self.event_log, nodes=nodes)
        loop.leave_cells_taken_over()
        loop.record_orphan()
        loop.run(loop.coming())
        if nodes.lost:
            raise JobEnding(Status.killed, nodes.lost, requeue=True, cause="node lost")

    def _columns(self, sweep: Path) -> dict[str, Any]:
        """Return what every record of the job says."""
        queued_s = self._started_at - self.facts["time"]
        return {
            **code_that_runs(sweep, self.facts.get("code", {})),
            "launcher": "slurm",
            "slurm_job_id": self.env.shown_id,
            "queued_s": None if queued_s < 0 else round(queued_s, 1),  # two clocks
        }

    def end(self, code: int, cause: str, reason: str = "", **facts: Any) -> int:
        """Write the end of this start of the job, shut the agents down, and return the exit code."""
        self.event_log.write("job_end", cause=cause, reason=reason, exit_code=code, **facts)
        if reason:
            print(reason, file=sys.stderr)
        if self._nodes:
            self._nodes.shut_down()
        return code

    def interrupt(self, ending: JobEnding) -> int:
        """End, and requeue the job for its remaining runs where it should be."""
        num_remaining = len(self.event_log.remaining_runs)
        requeued = ending.requeue and num_remaining > 0
        self.end(
            INTERRUPTED, ending.cause, ending.reason, requeued=requeued, remaining=num_remaining
        )
        if requeued and (ending.cause == CAUSE_REQUEUED or requeue(self.env.job_id)):
            time.sleep(SECONDS_TO_BE_REQUEUED)  # Slurm ends this start of the job meanwhile
        return INTERRUPTED

    def _on_wait(self) -> None:
        """Called while ranks run: act on Slurm's signals, and write heartbeats.

        Raises:
            JobEnding: a signal says that the job must end.
        """
        if ending := self.signals.due():
            left = round(self.signals.seconds_left, 1)
            self.event_log.write("signal", signal=self.signals.received, seconds_left=left)
            if self._nodes:
                self._nodes.kill_timeout_s = SHORT_KILL_TIMEOUT_SECONDS
            raise ending
        self.event_log.heartbeat()
