"""What Slurm's signals to a job mean: preempted, out of time, or cancelled."""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from vitsweep.execution.runner import RunEnding
from vitsweep.launchers.slurm.commands import controller_settings, slurm_output
from vitsweep.launchers.slurm.state.jobs import (
    CAUSE_CANCELLED,
    CAUSE_PREEMPTED,
    CAUSE_REQUEUED,
    CAUSE_TIME_LIMIT,
)
from vitsweep.results.record import Status

MARGIN_SECONDS = 90
"""Slurm checks time limits every 30 s and may signal up to a minute early."""
SECONDS_UNTIL_STATE_CHANGES = 2.0
NO_TIME = ("None", "Unknown", "N/A")
SECONDS_TO_RECORD = 5.0
"""Kept back from the time in which a training saves itself."""
KILL_WAIT_SECONDS = 30.0
"""Slurm's default of KillWait: between SIGTERM and SIGKILL of a cancelled job."""


class JobEnding(RunEnding):
    """The job must stop working.

    Args:
        status: of the run in flight.
        reason: one sentence.
        requeue: whether the remaining runs should be done in a later start of the job.
        cause: in a word or two.
        seconds_left: until Slurm kills the job.
    """

    def __init__(
        self, status: Status, reason: str, *, requeue: bool, cause: str, seconds_left: float = 0
    ) -> None:
        super().__init__(reason, seconds_left - min(SECONDS_TO_RECORD, seconds_left / 3))
        self.status, self.reason, self.requeue, self.cause = status, reason, requeue, cause


@dataclass
class Signals:
    """Signals that the job has received.

    Attributes:
        job_id: of this job.
        shown_id: its id as Slurm's tools show it.
        started_at: when this start of the job began, on the monotonic clock.
        limit_s: its time limit.
        delay_s: how long before the limit Slurm sends USR2.
        restart: how often Slurm has started the job before.
        received: name of the latest signal, or "".
        received_at: when it came, on the monotonic clock.
    """

    job_id: str
    shown_id: str
    started_at: float
    limit_s: float
    delay_s: float
    restart: int = 0
    received: str = ""
    received_at: float = 0.0
    _ending: tuple[str, "JobEnding"] | None = None

    def install_handlers(self) -> None:
        """Take the signals from now on."""
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received, self.received_at = signal.Signals(number).name, time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Seconds to the time limit."""
        return self.started_at + self.limit_s - time.monotonic()

    def due(self) -> "JobEnding | None":
        """Return what the signal means, once it is time to act on it.

        Slurm may warn of the time limit much earlier than requested; until `delay_s` before it there
        is time to measure.
        """
        if not self.received:
            return None
        if self._ending is None or self._ending[0] != self.received:
            self._ending = self.received, self.ending()
        is_warning = self.received == "SIGUSR2" and self._ending[1].cause == CAUSE_TIME_LIMIT
        return None if is_warning and self.seconds_left > self.delay_s else self._ending[1]

    def ending(self) -> JobEnding:
        """Return what the signal means: from what the controller says, else from the clock."""
        facts = self._facts()
        what = f"job {self.shown_id} (signal {self.received})"
        if facts.get("JobState") == "CANCELLED":
            return self._cancelled(f"Somebody cancelled {what}.")
        if int(facts.get("Restarts", 0)) > self.restart:
            # without grace time: KillWait, often 30 s, is not to be relied on
            return JobEnding(
                Status.preempted,
                f"Slurm requeued {what} without grace time.",
                requeue=True,
                cause=CAUSE_REQUEUED,
            )
        if facts.get("PreemptTime", "None") not in NO_TIME:
            return self._preempted(f"Slurm preempted {what}.")
        if self.seconds_left < self.delay_s + MARGIN_SECONDS:
            reason = f"The time limit of {self.limit_s / 60:g} min ended {what}."
            is_warned = self.received != "SIGTERM"
            left = min(self.delay_s, self.seconds_left) if is_warned else self._seconds_to_kill()
            return JobEnding(
                Status.timed_out, reason, requeue=True, cause=CAUSE_TIME_LIMIT, seconds_left=left
            )
        if self.received == "SIGTERM":
            return self._cancelled(f"Slurm ended {what}: it was cancelled.")
        return self._preempted(f"Slurm preempted {what}.")

    def _facts(self) -> Mapping[str, str]:
        """Return what the controller says; it may signal a moment before the job's state changes."""
        deadline = time.monotonic() + SECONDS_UNTIL_STATE_CHANGES
        while True:
            facts = job_facts(self.job_id)
            unchanged = (
                self.received == "SIGTERM"
                and facts.get("JobState") == "RUNNING"
                and facts.get("PreemptTime", "None") in NO_TIME
            )
            if not unchanged or time.monotonic() > deadline:
                return facts
            time.sleep(0.2)

    def _preempted(self, reason: str) -> JobEnding:
        """A job cannot ask for its partition's grace time: `delay_s` is what the site promises."""
        left = self.delay_s
        return JobEnding(
            Status.preempted, reason, requeue=True, cause=CAUSE_PREEMPTED, seconds_left=left
        )

    def _cancelled(self, reason: str) -> JobEnding:
        """A cancelled training may save itself until Slurm kills the job: the next sweep goes on with it."""
        return JobEnding(
            Status.killed,
            reason,
            requeue=False,
            cause=CAUSE_CANCELLED,
            seconds_left=self._seconds_to_kill(),
        )

    def _seconds_to_kill(self) -> float:
        """Return the seconds until Slurm kills a job that it has sent SIGTERM, whatever the reason."""
        return kill_wait_seconds() - (time.monotonic() - self.received_at)


def kill_wait_seconds() -> float:
    """Return the cluster's KillWait; Slurm's default where the controller does not say."""
    shown = controller_settings().get("KillWait", "").split()  # such as "30 sec"
    return float(shown[0]) if shown else KILL_WAIT_SECONDS


def job_facts(job_id: str) -> Mapping[str, str]:
    """Return what the controller says about a job; {} where it does not answer."""
    words = (slurm_output("scontrol", "-o", "show", "job", job_id) or "").split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def requeue(job_id: str) -> bool:
    """Let Slurm start this job again later, which ends the present start at once; False if refused."""
    return slurm_output("scontrol", "requeue", job_id) is not None
