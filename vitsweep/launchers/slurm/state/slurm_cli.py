"""Slurm's own commands, asked with a time limit; one that is missing or silent is no error."""

import shutil
import subprocess
from dataclasses import dataclass

from vitsweep.errors import VitsweepError

SECONDS_AT_MOST = 20
LIVE = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING "
    "SIGNALING STAGE_OUT STOPPED SPECIAL_EXIT RESV_DEL_HOLD".split()
)
"""States in which a job is still Slurm's; every other one is final."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm says of one element of an array.

    Attributes:
        state: in Slurm's words.
        reason: why it waits, or how it ended.
        exit_code: of the batch script, where known.
    """

    state: str
    reason: str = ""
    exit_code: int | None = None

    @property
    def live(self) -> bool:
        """Whether it may still run."""
        return self.state in LIVE


def ask(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_AT_MOST)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def require_slurm() -> None:
    """Stop where nothing can be submitted.

    Raises:
        VitsweepError: there is no `sbatch`, or no controller answers.
    """
    if not shutil.which("sbatch"):
        raise VitsweepError(
            "`hydra/launcher=slurm` needs Slurm's client commands and there is no `sbatch` here: "
            "type the command on a login node, or use `hydra/launcher=local`."
        )


def queue(array_ids: set[str]) -> dict[str, Job] | None:
    """Return `array_index` -> job as the controller knows it; None where it does not answer."""
    shown = ask("squeue", "--me", "-h", "-r", "-t", "all", "-O", _QUEUE)
    if shown is None:
        return None
    jobs = {}
    for line in shown.splitlines():
        array, index, state, reason, code = (word.strip() for word in line.split("|")[:5])
        if array in array_ids:
            jobs[f"{array}_{index}"] = Job(
                state=state, reason=reason, exit_code=_wait_status(code, state)
            )
    return jobs


_QUEUE = "ArrayJobID: |,ArrayTaskID: |,State: |,Reason: |,exit_code: |"


def _wait_status(text: str, state: str) -> int | None:
    """squeue shows the status as `wait` gives it."""
    if state in LIVE or not text.isdigit():
        return None
    return int(text) >> 8


def accounting(array_ids: set[str]) -> dict[str, Job]:
    """Return what the accounting knows, or {} where there is none."""
    if not array_ids:
        return {}
    ids = ",".join(sorted(array_ids))
    shown = ask("sacct", "-n", "-X", "-P", "-o", "JobID,State,ExitCode", "-j", ids)
    jobs = {}
    for line in (shown or "").splitlines():
        name, state, code = [*line.split("|"), "", ""][:3]
        words = state.split(" ", 1)
        jobs[name] = Job(
            state=words[0], reason=" ".join(words[1:]), exit_code=int(code.split(":")[0] or 0)
        )
    return jobs


def cancel(jobs: list[str]) -> str:
    """Cancel elements of arrays; return what Slurm complained of."""
    complaints = []
    for start in range(0, len(jobs), 500):  # command lines have a limit
        done = subprocess.run(
            ["scancel", *jobs[start : start + 500]],
            capture_output=True,
            text=True,
            timeout=SECONDS_AT_MOST,
        )
        complaints.append(done.stderr.strip())
    return "\n".join(filter(None, complaints))
