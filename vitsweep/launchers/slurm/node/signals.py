"""What Slurm's signals to a job mean: preempted, out of time, or cancelled."""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from vitsweep.execution.supervisor import RunEnding
from vitsweep.launchers.slurm.state.slurm_cli import ask
from vitsweep.results.record import Status

MARGIN_SECONDS = 90
"""Slurm looks at time limits every 30 s and may signal up to a minute early."""

TIME_LIMIT = "time limit"


SECONDS_TO_RECORD = 5.0
"""Kept back from the time in which a training saves itself."""


class JobEnding(RunEnding):
    """The job must stop working.

    Args:
        status: of the run in flight.
        reason: one sentence.
        requeue: whether the rest should run in a later start of the job.
        cause: in a word or two.
        seconds_left: until Slurm kills the job.
    """

    def __init__(
        self, status: Status, reason: str, *, requeue: bool, cause: str, seconds_left: float = 0
    ) -> None:
        super().__init__(reason, seconds_left - SECONDS_TO_RECORD)
        self.status, self.reason, self.requeue, self.cause = status, reason, requeue, cause


@dataclass
class Signals:
    """Signals that have come.

    Attributes:
        job_id: of this job.
        shown: its id as Slurm's tools show it.
        started: when this start of the job began, in seconds since 1970.
        limit_s: its time limit.
        delay_s: how long before the limit Slurm sends USR2.
    """

    job_id: str
    shown: str
    started: float
    limit_s: float
    delay_s: float
    came: str = ""
    _ending: tuple[str, "JobEnding"] | None = None

    def watch(self) -> None:
        """Take the signals from now on."""
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number).name

    @property
    def seconds_left(self) -> float:
        """Seconds to the time limit."""
        return self.started + self.limit_s - time.time()

    def due(self) -> "JobEnding | None":
        """Return what the signals mean, when it is time to act.

        Slurm may warn of the time limit much earlier than asked; until `delay_s` before it there is
        time to measure.
        """
        if not self.came:
            return None
        if self._ending is None or self._ending[0] != self.came:
            self._ending = self.came, self.ending()
        warned = self.came == "SIGUSR2" and self._ending[1].cause == TIME_LIMIT
        return None if warned and self.seconds_left > self.delay_s else self._ending[1]

    def ending(self) -> JobEnding:
        """Say what the signal meant, by what the controller says of the job, else by the clock."""
        facts = job_facts(self.job_id)
        told = f"job {self.shown} (signal {self.came})"
        if facts.get("JobState") == "CANCELLED":
            return _cancelled(f"Somebody cancelled {told}.")
        if facts.get("PreemptTime", "None") not in ("None", "Unknown", "N/A"):
            return self._preempted(f"Slurm preempted {told}.")
        if self.seconds_left < self.delay_s + MARGIN_SECONDS:
            reason = f"The time limit of {self.limit_s / 60:g} min ended {told}."
            left = min(self.delay_s, self.seconds_left)
            return JobEnding(
                Status.timed_out, reason, requeue=True, cause=TIME_LIMIT, seconds_left=left
            )
        if self.came == "SIGTERM":
            return _cancelled(f"Slurm ended {told}: it was cancelled.")
        return self._preempted(f"Slurm preempted {told}.")

    def _preempted(self, reason: str) -> JobEnding:
        """How long Slurm gives it is the partition's secret: `delay_s` is what the site promises."""
        left = self.delay_s
        return JobEnding(
            Status.preempted, reason, requeue=True, cause="preempted", seconds_left=left
        )


def _cancelled(reason: str) -> JobEnding:
    return JobEnding(Status.killed, reason, requeue=False, cause="cancelled")


def job_facts(job_id: str) -> Mapping[str, str]:
    """Return what the controller says of a job; {} where it does not answer."""
    words = (ask("scontrol", "-o", "show", "job", job_id) or "").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def requeue(job_id: str) -> bool:
    """Ask Slurm to start this job again later; it ends the present start at once."""
    return ask("scontrol", "requeue", job_id) is not None
