"""The lead of a job, on its first node: decides what runs next, on all nodes, and writes it down."""

import errno
import sys
import time
from dataclasses import replace
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import Verdict, publish
from vitsweep.execution.run_request import RunRequest
from vitsweep.launchers.slurm.node.agent import SECONDS_TO_MEET
from vitsweep.launchers.slurm.node.event_log import JobEventWriter
from vitsweep.launchers.slurm.node.execute import Runner
from vitsweep.launchers.slurm.node.job_environment import JobEnvironment
from vitsweep.launchers.slurm.node.remote_nodes import Nodes
from vitsweep.launchers.slurm.node.signals import JobEnding, Signals, requeue
from vitsweep.launchers.slurm.node.transport import AgentListener
from vitsweep.launchers.slurm.state.job_events import Run
from vitsweep.launchers.slurm.state.job_files import Element
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store

SECONDS_UNTIL_REQUEUED = 180
DONE, ENDED_OTHERWISE, NOT_STARTED, GAVE_UP = 0, 3, 4, 5
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def lead(place: JobEnvironment, element: Element) -> int:
    """Do the work of a job; return its exit code, which Slurm keeps even where the disk is full."""
    try:
        work = Coordinator(place, element)
        try:
            work.begin()
            work.run_all()
        except JobEnding as ending:
            return work.give_up(ending)
        except VitsweepError as error:
            return work.end(NOT_STARTED, "not started", str(error))
        return work.end(DONE if work.event_log.all_measured else ENDED_OTHERWISE, "done")
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"{error}: nothing more can be written.", file=sys.stderr)
        return int(error.errno or 1)


class Coordinator:
    """Works through the runs of one job, on all its nodes.

    Args:
        place: of this process.
        element: what the job was told.
    """

    def __init__(self, place: JobEnvironment, element: Element) -> None:
        self.place, self.facts = place, element.array.facts
        self.folder = element.array.folder
        self.event_log = JobEventWriter(element, place.restart)
        self._started = time.time()
        self._runs_begun, self._ending = 0, False
        self._nodes: Nodes | None = None
        limit_s, delay_s = self.facts["request"]["minutes"] * 60, self.facts["signal_delay_s"]
        self.signals = Signals(place.job_id, place.shown, self._started, limit_s, delay_s)

    def begin(self) -> None:
        """Say that the job has started, and meet the agents of all nodes."""
        self.signals.watch()
        place = self.place
        ids = {"job_id": place.job_id, "array_id": place.array_id}
        self.event_log.note("job_start", **ids, nodes=list(place.nodes))
        meeting = AgentListener(place, place.key(self.folder))
        self._nodes = Nodes(meeting.gather(place.nodes, SECONDS_TO_MEET), self._on_wait)
        self.runner = Runner(
            store=Store(self.folder.parents[1]),
            scratch=self.folder,
            place=place,
            nodes=self._nodes,
            queued_s=self._started - self.facts["time"],
            pair=self.facts.get("pair", True),
        )
        self._record_orphan()

    def run_all(self) -> None:
        """Do what is left to do."""
        while left := self.event_log.left:
            if restart := self.event_log.replaced_by:
                reason = f"Slurm has started the job again (restart {restart})."
                raise JobEnding(Status.killed, reason, requeue=False, cause="replaced")
            self._run(left[0])

    def end(self, code: int, cause: str, reason: str = "", **facts: Any) -> int:
        """Write the last word of this start of the job and return the exit code."""
        self.event_log.note("job_end", cause=cause, reason=reason, exit_code=code, **facts)
        if reason:
            print(reason, file=sys.stderr)
        if self._nodes:
            self._nodes.leave()
        return code

    def give_up(self, ending: JobEnding) -> int:
        """End, and let the rest run in a later start of the job where it should."""
        left = len(self.event_log.left)
        again = ending.requeue and left > 0
        self.end(GAVE_UP, ending.cause, ending.reason, requeued=again, left=left)
        if again and requeue(self.place.job_id):
            time.sleep(SECONDS_UNTIL_REQUEUED)  # Slurm ends this start of the job meanwhile
        return GAVE_UP

    def _run(self, run: Run) -> None:
        attempt = self.event_log.earlier.attempts(run) + 1
        request = self.runner.request(run, attempt)
        attempts_without_progress = attempt - 1 - self.event_log.earlier.times_saved(run)
        if attempts_without_progress >= self.facts["max_attempts"]:
            reason = f"It was interrupted {attempts_without_progress} times (`hydra.launcher.max_attempts`)."
            return self.event_log.run_ends(run, self._record(request, Status.killed, reason))
        self.event_log.note("run_start", run=run.name, cell_id=run.cell_id, run_id=request.run_id)
        self._runs_begun += 1
        try:
            record = self._attempt(request)
        except JobEnding as ending:
            step, reason = ending.saved_step, ending.reason
            if step is not None:
                reason += f" Its training is saved after {step} steps and goes on from there."
            record = self._record(request, ending.status, reason)
            had_all_time = ending.status == Status.timed_out and self._runs_begun == 1
            over = record.status == Status.measured or (had_all_time and step is None)
            again = ending.requeue and not over
            self.event_log.run_ends(run, record, again=again, saved_step=step)
            raise
        lost = self._nodes.lost if self._nodes else ""
        self.event_log.run_ends(run, record, again=bool(lost))
        if lost:
            raise JobEnding(Status.killed, lost, requeue=True, cause="node lost")
        return None

    def _attempt(self, request: RunRequest) -> RunRecord:
        rates = self.runner.rates(request.cell_id)
        here = self.runner.meeting_point()
        return self.runner.run(replace(request, calibration=rates, init_method=here))

    def _record(self, request: RunRequest, status: Status, reason: str) -> RunRecord:
        return publish(request, self.runner.cell(request.cell_id), Verdict(status, reason))

    def _record_orphan(self) -> None:
        """Record what an earlier start left in flight, so that nothing can record it later."""
        flying = self.event_log.earlier.in_flight or {"run": None}
        for run in self.event_log.left:
            if run.name == flying["run"]:
                request = self.runner.request(run, self.event_log.earlier.attempts(run))
                reason = "Its job died without a word and was started again."
                record = self._record(request, Status.killed, reason)
                self.event_log.run_ends(run, record, again=record.status == Status.killed)

    def _on_wait(self) -> None:
        if self._ending:
            return  # said already; a training is saving itself
        if ending := self.signals.due():
            self._ending = True
            left = round(self.signals.seconds_left, 1)
            self.event_log.note("signal", signal=self.signals.came, seconds_left=left)
            if self._nodes:
                self._nodes.shorten_kill_timeout()
            raise ending
        self.event_log.beat()
