"""Job arrays through submitit: each element runs a command on a task file, nothing is pickled."""

import contextlib
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.state.job_files import Array
from vitsweep.launchers.slurm.submit.job_request import Request
from vitsweep.launchers.slurm.submit.packing import PlannedJob
from vitsweep.launchers.slurm.submit.settings import SlurmSettings
from vitsweep.results.store import Store, write_atomically

KEPT_IN_A_JOB = ("SLURM_CONF",)
AGENT = "vitsweep.launchers.slurm.node.agent"


def submit(
    store: Store,
    request: Request,
    jobs: Sequence[PlannedJob],
    settings: SlurmSettings,
    size: int,
    code: Path,
) -> list[Array]:
    """Submit the jobs of a group as arrays of at most `size` elements, each with indices from 0.

    Nodes import vitsweep from the folder `code`.

    Raises:
        VitsweepError: Slurm refuses; what was submitted before stays.
    """
    if "%" in str(store.root.absolute()):
        raise VitsweepError(
            f"`{store.root.absolute()}` holds a `%`, which Slurm replaces in the paths of logs: choose "
            "another `sweep.folder` or `sweep.name`."
        )
    starts = range(0, len(jobs), size)
    return [_submit_array(store, request, jobs[i : i + size], settings, code) for i in starts]


def _submit_array(
    store: Store, request: Request, jobs: Sequence[PlannedJob], settings: SlurmSettings, code: Path
) -> Array:
    stamp = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # names in the order of submission
    folder = store.root.absolute() / "jobs" / f"{stamp}-{request.name}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    lines = (json.dumps(job.document(), separators=(",", ":")) for job in jobs)
    write_atomically(folder / "tasks.jsonl", "\n".join(lines) + "\n")
    _write_key(folder / "key")
    facts = {
        "sweep": store.name,
        "time": time.time(),
        "request": vars(request),
        "max_attempts": settings.max_attempts,
        "signal_delay_s": settings.signal_delay_s,
        "pair": settings.pair,
        "elements": len(jobs),
        "minutes": [round(job.minutes, 1) for job in jobs],
    }
    write_atomically(folder / "array.json", json.dumps(facts, indent=1))
    asked = parameters(store.name, request, settings, code) | {"map_count": len(jobs)}
    slurm_id = _sbatch(folder, request, settings, asked)
    write_atomically(folder / "slurm_id", slurm_id)
    return Array(folder)


def _write_key(path: Path) -> None:
    """Agents of a job prove to one another that they may read this folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, secrets.token_hex(32).encode())
    os.close(descriptor)


def _sbatch(folder: Path, request: Request, settings: SlurmSettings, asked: dict[str, Any]) -> str:
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    executor = SlurmExecutor(folder=folder)
    executor.parameters = asked
    try:
        with outside_any_job():
            return str(executor._submit_command(command(folder, settings)).job_id)
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        (folder / "array.json").unlink()  # there is no such array
        said = str(error).strip().splitlines()
        words = next((line for line in said[::-1] if "sbatch: error" in line), said[-1])
        raise VitsweepError(
            f"Slurm refuses the job array of group {request.name} ({words.strip()}). Asked for: "
            f"{request.sbatch(settings)}; the batch script is in `{folder}`."
        ) from error


def parameters(sweep: str, request: Request, settings: SlurmSettings, code: Path) -> dict[str, Any]:
    """Return what submitit writes into the batch script, quoted by it."""
    cpus = f"--cpus-per-task={request.cpus}"  # srun does not inherit it since Slurm 22.05
    asked = {
        "job_name": f"vitsweep-{sweep}",
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "exclude": settings.exclude,
        "comment": settings.comment,
        "gres": settings.gres,
        "exclusive": settings.exclusive or None,
        "signal_delay_s": settings.signal_delay_s,
        "array_parallelism": settings.array_parallelism,
        "setup": [_importable(code), *settings.setup],
        "srun_args": [cpus, "--cpu-bind=none", "--kill-on-bad-exit=0", *settings.srun_args],
        "stderr_to_stdout": True,
        "additional_parameters": _additional(settings),
    }
    known = {key: value for key, value in asked.items() if value is not None}
    return known | request.sbatch(settings)


def _additional(settings: SlurmSettings) -> dict[str, Any]:
    extra: dict[str, Any] = {"requeue": True}
    if settings.reservation is not None:
        extra["reservation"] = settings.reservation
    return extra | dict(settings.additional_parameters)


def _importable(code: Path) -> str:
    """Let nodes import the code that this command means, wherever it was typed."""
    return f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"


def command(folder: Path, settings: SlurmSettings) -> str:
    """Return what every node runs, as a line of shell."""
    python: Sequence[str] = (sys.executable,)
    if settings.python is not None:
        python = (settings.python,) if isinstance(settings.python, str) else settings.python
    return shlex.join([*python, "-u", "-m", AGENT, str(folder)])


@contextlib.contextmanager
def outside_any_job() -> Iterator[None]:
    """Hide the job in which the command is typed: its SLURM_* variables would change the new one."""
    hidden = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")) and key not in KEPT_IN_A_JOB
    }
    for key in hidden if "SLURM_JOB_ID" in hidden else ():
        del os.environ[key]
    try:
        yield
    finally:
        os.environ.update(hidden)
