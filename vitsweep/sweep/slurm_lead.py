"""The lead of a job, on its first node: decides what runs next, on all nodes, and writes it down."""

import errno
import sys
import time
from dataclasses import replace
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store, append_line
from vitsweep.sweep.outcome import Verdict, publish
from vitsweep.sweep.slurm_agent import SECONDS_TO_MEET
from vitsweep.sweep.slurm_jobs import Element, Run
from vitsweep.sweep.slurm_link import Meeting, Place
from vitsweep.sweep.slurm_nodes import Nodes
from vitsweep.sweep.slurm_runner import Runner
from vitsweep.sweep.slurm_signals import JobEnding, Signals, requeue

BEAT_SECONDS = 30.0
SECONDS_UNTIL_REQUEUED = 180
DONE, ENDED_OTHERWISE, NOT_STARTED, GAVE_UP = 0, 3, 4, 5
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def lead(place: Place, element: Element) -> int:
    """Do the work of a job; return its exit code, which Slurm keeps even where the disk is full."""
    try:
        work = Lead(place, element)
        try:
            work.begin()
            work.run_all()
        except JobEnding as ending:
            return work.give_up(ending)
        except VitsweepError as error:
            return work.end(NOT_STARTED, "not started", str(error))
        return work.end(DONE if work.all_measured else ENDED_OTHERWISE, "done")
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"{error}: nothing more can be written.", file=sys.stderr)
        return int(error.errno or 1)


class Lead:
    """Works through the runs of one job, on all its nodes, and keeps its life.

    Args:
        place: of this process.
        element: what the job was told.
    """

    def __init__(self, place: Place, element: Element) -> None:
        self.place, self.element = place, element
        self.facts = element.array.facts
        self.life = element.life()  # of earlier starts
        self._ended = self.life.ended()
        self._over = {
            r.cell_id for r in element.runs() if self._ended.get(r.name) not in (None, "measured")
        }
        self._started = time.time()
        self._beat_at = 0.0
        self._runs_begun = 0
        self._nodes: Nodes | None = None
        minutes = self.facts["request"]["minutes"]
        self.signals = Signals(
            place.job_id, place.shown, self._started, minutes * 60, self.facts["signal_delay_s"]
        )

    def begin(self) -> None:
        """Say that the job has started, and meet the agents of all nodes."""
        self.signals.watch()
        place = self.place
        self._note(
            "job_start", job_id=place.job_id, array_id=place.array_id, nodes=list(place.nodes)
        )
        meeting = Meeting(place, place.key(self.element.array.folder))
        self._nodes = Nodes(meeting.gather(place.nodes, SECONDS_TO_MEET), self._on_wait)
        self.runner = Runner(
            store=Store(self.element.array.folder.parents[1]),
            scratch=self.element.array.folder,
            place=place,
            nodes=self._nodes,
            queued_s=self._started - self.facts["time"],
        )
        self._bury()

    def run_all(self) -> None:
        """Do what is left to do."""
        for run in self.element.runs():
            if run.name not in self._ended and run.cell_id not in self._over:
                self._stop_if_replaced()
                self._run(run)

    def end(self, code: int, cause: str, reason: str = "", **facts: Any) -> int:
        """Write the last word of this start of the job and return the exit code."""
        self._note("job_end", cause=cause, reason=reason, exit_code=code, **facts)
        if reason:
            print(reason, file=sys.stderr)
        if self._nodes:
            self._nodes.leave()
        return code

    @property
    def all_measured(self) -> bool:
        """Whether every run that ended was measured."""
        return set(self._ended.values()) <= {str(Status.measured)}

    def give_up(self, ending: JobEnding) -> int:
        """End, and let the rest run in a later start of the job where it should."""
        left = [
            r
            for r in self.element.runs()
            if r.name not in self._ended and r.cell_id not in self._over
        ]
        again = ending.requeue and bool(left)
        self.end(GAVE_UP, ending.cause, ending.reason, requeued=again, left=len(left))
        if again and requeue(self.place.job_id):
            time.sleep(SECONDS_UNTIL_REQUEUED)  # Slurm ends this start of the job meanwhile
        return GAVE_UP

    def _run(self, run: Run) -> None:
        attempt = self.life.attempts(run) + 1
        request = self.runner.request(run, attempt)
        if attempt > self.facts["max_attempts"]:
            reason = f"It was interrupted {attempt - 1} times (`hydra.launcher.max_attempts`)."
            verdict = Verdict(Status.killed, reason)
            return self._ends(run, publish(request, self.runner.cell(run.cell_id), verdict))
        self._note("run_start", run=run.name, cell_id=run.cell_id, run_id=request.run_id)
        self._runs_begun += 1
        try:
            rates = self.runner.rates(run.cell_id)
            here = self.runner.meeting_point()
            record = self.runner.run(replace(request, calibration=rates, init_method=here))
        except JobEnding as ending:
            verdict = Verdict(ending.status, ending.reason)
            record = publish(request, self.runner.cell(run.cell_id), verdict)
            had_all_time = ending.status == Status.timed_out and self._runs_begun == 1
            self._ends(run, record, again=ending.requeue and not had_all_time)
            raise
        lost = self._nodes.lost if self._nodes else ""
        self._ends(run, record, again=bool(lost))
        if lost:
            raise JobEnding(Status.killed, lost, requeue=True, cause="node lost")
        return None

    def _ends(self, run: Run, record: RunRecord, again: bool = False) -> None:
        """Note the end of a run; a cell that was not measured would end so in the next block too."""
        if not again:
            self._ended[run.name] = str(record.status)
            self._over |= {run.cell_id} if record.status != Status.measured else set()
        self._note(
            "run_end",
            run=run.name,
            cell_id=run.cell_id,
            run_id=record.run_id,
            status=str(record.status),
            reason=record.reason,
            images_per_second=record.metrics.get("images_per_second"),
            again=again,
        )

    def _bury(self) -> None:
        """Record what an earlier start left in flight, so that nothing can record it later."""
        left = self.life.in_flight or {"run": None}
        for run in self.element.runs():
            if run.name == left["run"]:
                request = self.runner.request(run, self.life.attempts(run))
                verdict = Verdict(
                    Status.killed, "Its job died without a word and was started again."
                )
                record = publish(request, self.runner.cell(run.cell_id), verdict)
                self._ends(run, record, again=record.status == Status.killed)

    def _on_wait(self) -> None:
        if ending := self.signals.due():
            self._note("signal", signal=self.signals.came, seconds_left=self.signals.seconds_left)
            if self._nodes:
                self._nodes.hurry()
            raise ending
        if time.monotonic() > self._beat_at + BEAT_SECONDS:
            self._note("beat")

    def _stop_if_replaced(self) -> None:
        """A job that Slurm believes dead, and has started again elsewhere, must not go on."""
        last = self.element.life().last_start
        if last and last["restart"] > self.place.restart:
            reason = f"Slurm has started the job again (restart {last['restart']})."
            raise JobEnding(Status.killed, reason, requeue=False, cause="replaced")

    def _note(self, event: str, **facts: Any) -> None:
        line = {"event": event, "time": time.time(), "restart": self.place.restart}
        append_line(self.element.life_path, line | facts)
        self._beat_at = time.monotonic()
