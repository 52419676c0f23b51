"""Job arrays through submitit: each job runs a command on a task file, nothing is pickled."""

import contextlib
import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import Run
from vitsweep.files import make_folder, remove, write_atomically
from vitsweep.interpreters import folder_on_path
from vitsweep.launchers.nodes.transport import write_key
from vitsweep.launchers.slurm.commands import controller_settings, submitted_scripts
from vitsweep.launchers.slurm.state.jobs import JobArray, Work
from vitsweep.launchers.slurm.submit.settings import Request, SlurmSettings, groups, request_of
from vitsweep.planning.blocks import BalancedOrder, Block, blocks, comparisons
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.lease import require_leases
from vitsweep.results.provenance import SECRET_VALUE
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.technique import SECRET_NAME

# How long the runs of a sweep take: measured, predicted, or assumed.


def run_minutes(
    plan: SweepPlan, runs: Sequence[RunRecord], predicted: Mapping[str, float], assumed: float
) -> tuple[dict[str, float], frozenset[str]]:
    """Return the expected minutes of a run of each cell, and the cells of which they are known.

    A cell that ran takes the median of its measured runs, another one its prediction. Without these it takes
    the median of all measured runs, or `assumed`.

    Args:
        plan: the cells.
        runs: of the sweep, made so far.
        predicted: cell id -> predicted minutes of a run.
        assumed: `hydra.launcher.minutes_per_run`.
    """
    measured: dict[str, list[float]] = {}
    for run in runs:
        if run.status == Status.measured and "run_seconds" in run.environment:
            measured.setdefault(run.cell_id, []).append(run.environment["run_seconds"] / 60)
    medians = {cell_id: median(minutes) for cell_id, minutes in measured.items()}
    known = {**predicted, **medians}
    default = median(medians.values()) if medians else assumed
    minutes = {cell_id: known.get(cell_id, default) for cell_id in plan.entries}
    return minutes, frozenset(known)


LIMIT_MARGIN, START_MINUTES = 1.5, 5
"""Time limit of a job: its runs' expected minutes x margin + start of the job + timeout of one run."""


@dataclass(frozen=True)
class PlannedJob:
    """The work of one job.

    Attributes:
        blocks: in the order in which they run.
        minutes: how long that is expected to take.
    """

    blocks: tuple[Block, ...]
    minutes: float

    @property
    def cells(self) -> set[str]:
        """Cells of which something runs here."""
        return {entry.cell_id for block in self.blocks for entry in block.entries}

    def document(self, store: Store) -> dict[str, Any]:
        """Return it as the job reads it: the cells themselves are frozen in the store.

        What belongs to the command and not to a frozen cell, the digest of what was frozen, and the code
        that was there when the job was submitted, stand under `cells`.
        """
        entries = {entry.cell_id: entry for block in self.blocks for entry in block.entries}
        return {
            "blocks": [{"name": block.name, "runs": _runs(block)} for block in self.blocks],
            **({"metrics": dict(store.metrics)} if store.metrics else {}),
            "cells": {
                cell_id: {
                    **entry.spec.of_command,
                    "code_hash": entry.code.hash,
                    "sha256": store.digest(cell_id),
                }
                for cell_id, entry in entries.items()
            },
        }


def _runs(block: Block) -> list[dict[str, str]]:
    runs = [Run.new(block.name, n, e.cell_id) for n, e in enumerate(block.entries)]
    return [{"cell_id": run.cell_id, "run_id": run.name} for run in runs]


def pack(
    plan: SweepPlan,
    missing: Mapping[str, int],
    minutes_of_run: Mapping[str, float],
    known: Collection[str],
    settings: SlurmSettings,
    cells_per_block: int,
    order: BalancedOrder | None = None,
) -> dict[Request, list[PlannedJob]]:
    """Return the jobs of every group, the longest first: a short one at the end wastes less.

    A time limit is shortened to what its jobs are expected to take, with a margin, where that is
    known: schedulers start short jobs earlier (backfill).

    Args:
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        minutes_of_run: of each cell.
        known: cells of which these were measured or predicted.
        settings: of the launcher; `cells_per_job` and `minutes_per_job` decide.
        cells_per_block: cells of one block, baselines not counted.
        order: of the cells within blocks; one that knows of no earlier blocks where not given.
    """
    order, plan = order or BalancedOrder(), paired(plan, settings)
    pending = [entry for entry in plan.runnable if missing.get(entry.cell_id)]

    def planned(members: list[PlannedCell], group: SweepPlan) -> PlannedJob:
        """Return the job of some cells of a group."""
        missing_here = {entry.cell_id: missing[entry.cell_id] for entry in members}
        baselines = [group.entries[e.baseline_id] for e in members if e.baseline_id]
        plan_here = SweepPlan({entry.cell_id: entry for entry in [*members, *baselines]})
        of_job = tuple(blocks(plan_here, missing_here, cells_per_block, order))
        minutes = sum(minutes_of_run[e.cell_id] for block in of_job for e in block.entries)
        return PlannedJob(of_job, minutes)

    packed: dict[Request, list[PlannedJob]] = {}
    for request, members in groups(pending, settings).items():
        beside = {e.baseline_id: plan.entries[e.baseline_id] for e in members if e.baseline_id}
        group = SweepPlan({**beside, **{e.cell_id: e for e in members}})
        bins = _bins(group, missing, minutes_of_run, settings, cells_per_block)
        jobs = sorted((planned(job, group) for job in bins), key=lambda job: -job.minutes)
        if all(job.cells <= {*known} for job in jobs):
            request = request.for_work_of(LIMIT_MARGIN * jobs[0].minutes + START_MINUTES, settings)
        packed.setdefault(request, []).extend(jobs)
    return packed


def paired(plan: SweepPlan, settings: SlurmSettings) -> SweepPlan:
    """Return the plan as its runs are counted: baselines that run in other jobs are no partners.

    Such a baseline shares no block with its cells, so that it needs all its runs for itself.
    """
    entries = dict(plan.entries)
    for cell_id, entry in plan.entries.items():
        baseline = plan.entries.get(entry.baseline_id or "")
        if baseline is None or baseline.cell_id == cell_id:
            continue
        if request_of(entry.spec, settings) != request_of(baseline.spec, settings):
            entries[cell_id] = replace(entry, baseline_id=None)
            entries[baseline.cell_id] = replace(entries[baseline.cell_id], is_added_baseline=False)
    return SweepPlan(entries)


def _bins(
    plan: SweepPlan,
    missing: Mapping[str, int],
    minutes_of_run: Mapping[str, float],
    settings: SlurmSettings,
    cells_per_block: int,
) -> Iterator[list[PlannedCell]]:
    """Yield the cells of one job after the other; a comparison is split only if it does not fit."""
    fixed = None if settings.cells_per_job == "auto" else settings.cells_per_job
    pending = [entry for entry in plan.entries.values() if missing.get(entry.cell_id)]
    minutes_of_cell = {e.cell_id: missing[e.cell_id] * minutes_of_run[e.cell_id] for e in pending}
    fitting = max(1, int(settings.minutes_per_job / max(minutes_of_cell.values(), default=1)) - 1)
    job: list[PlannedCell] = []
    minutes = 0.0
    for part in comparisons(pending, min(cells_per_block, fixed or fitting)):
        costs = sum(minutes_of_cell[e.cell_id] for e in part)
        costs += _baseline_minutes(part, missing, minutes_of_run)
        full = len(job) + len(part) > fixed if fixed else minutes + costs > settings.minutes_per_job
        if job and full:
            yield job
            job, minutes = [], 0.0
        job, minutes = [*job, *part], minutes + costs
    if job:
        yield job


def _baseline_minutes(
    part: list[PlannedCell], missing: Mapping[str, int], minutes_of_run: Mapping[str, float]
) -> float:
    num_blocks = max(missing[entry.cell_id] for entry in part)
    baselines = {e.baseline_id for e in part if e.baseline_id} - {e.cell_id for e in part}
    return num_blocks * sum(minutes_of_run[baseline] for baseline in baselines)


# The batch script of an array of jobs.


KEPT_IN_A_JOB = {"SLURM_CONF"}
"""Variables that do not describe the job in which a command is typed."""
LEFT_TO_THE_SITE = ("account", "partition", "qos", "constraint", "reservation")
"""Options that SBATCH_* of a site's modules give where no setting does."""
PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TZ|TERM|TMPDIR|TMP|TEMP|HOSTNAME|LANG|LANGUAGE|LC_\w+|XDG_\w+|"
    r"\w*LIBRARY_PATH|LD_PRELOAD|MANPATH|CPATH|CC|CXX|PYTHON\w*|VIRTUAL_ENV|(CONDA|MAMBA)_\w+|_?LMFILES_|"
    r"LOADEDMODULES|MODULE\w*|LMOD_\w+|__LMOD_\w+|BASH_FUNC_\S+|BASH_ENV|"
    r"(CUDA|NVIDIA|NCCL|ROCR|ROCM|HIP|HSA|RCCL|GLOO|UCX|FI|IB|OMPI|PMI|PMIX|I_MPI|MPI|OFI)_?\w*|"
    r"(TORCH|PYTORCH|TORCHINDUCTOR|TRITON|ATEN|ONEDNN|DNNL|OMP|GOMP|KMP|MKL|OPENBLAS|NUMEXPR)_?\w*|"
    r"(SLURM|SLURMD|SBATCH|SRUN|MUNGE|VITSWEEP|HYDRA|SINGULARITY|APPTAINER)_\w+|"
    r"MALLOC_\w+|(HF|TRANSFORMERS|TIMM)_(HOME|CACHE|\w*_CACHE|\w*OFFLINE)|"
    r"((https?|ftp|no|all)_proxy)",
    re.I,
)
"""Names of variables that jobs get: where programs and libraries lie, and how they compute."""
UNCERTAIN = re.compile(r"timed? ?out|unable to contact|connection|communication|zero bytes", re.I)
"""What sbatch says where its request may have arrived and only the answer is lost."""
LOOK_UP_AFTER_S = (0, 1, 2, 4)
AGENT = "vitsweep.launchers.slurm.node.agent"
"""The module that runs on every node; a text, because nothing here needs it."""


def submit(
    store: Store,
    request: Request,
    jobs: Sequence[PlannedJob],
    settings: SlurmSettings,
    code: Path,
    code_state: Mapping[str, Any],
) -> JobArray:
    """Submit the jobs of a group as one array.

    Args:
        store: of the sweep.
        request: what each job asks for.
        jobs: the work of each job.
        settings: of the launcher.
        code: folder from which nodes import vitsweep.
        code_state: its git commit, see `freeze.code_state`.

    Raises:
        VitsweepError: Slurm refuses; arrays that were submitted before stay.
    """
    if "%" in str(store.root.absolute()):
        raise VitsweepError(
            f"`{store.root.absolute()}` holds a `%`, which Slurm replaces in the paths of logs: choose "
            "another `sweep.folder` or `sweep.name`."
        )
    stamp = f"{datetime.now():%Y%m%d-%H%M%S-%f}"  # names in the order of submission
    folder = store.root.absolute() / "jobs" / f"{stamp}-{request.name}-{secrets.token_hex(2)}"
    make_folder(folder)
    lines = (json.dumps(job.document(store), separators=(",", ":")) for job in jobs)
    work = Work("\n".join(lines) + "\n", write_key(folder / "key"))
    write_atomically(folder / "tasks.jsonl", work.tasks, durable=True)
    facts = {
        "sweep": store.name,
        "time": time.time(),
        "cluster": controller_settings().get("ClusterName", ""),
        "request": vars(request),
        "code": {key: code_state.get(key) for key in ("git_commit", "git_dirty")},
        "max_attempts": settings.max_attempts,
        "signal_delay_s": settings.signal_delay_s,
        "num_jobs": len(jobs),
        "minutes": [round(job.minutes, 1) for job in jobs],
    }
    write_atomically(folder / "array.json", json.dumps(facts, indent=1), durable=True)
    options = parameters(store.name, request, settings, code) | {"map_count": len(jobs)}
    require_leases(store.root)
    slurm_id = _sbatch(folder, request, settings, options, work.digest)
    write_atomically(folder / "slurm_id", slurm_id, durable=True)
    return JobArray(folder)


def _sbatch(
    folder: Path,
    request: Request,
    settings: SlurmSettings,
    options: dict[str, Any],
    digest: str,
) -> str:
    """Write the batch script and submit it; return the id of the array."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with environment_of_sbatch(options, settings.export):
            return _submit_command(folder, options, command(folder, settings, digest))
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        if UNCERTAIN.search(str(error)):
            return _id_if_taken(folder, request, error)
        remove(folder / "array.json")  # there is no such array
        lines = str(error).strip().splitlines()
        asked = {k: v for k in ("partition", "constraint", "gres") if (v := getattr(settings, k))}
        message = next((line for line in lines[::-1] if "sbatch: error" in line), lines[-1])
        raise VitsweepError(
            f"Slurm refuses the job array of group {request.name} ({message.strip()}). Requested: "
            f"{request.sbatch(settings) | asked}; the batch script is in `{folder}`."
        ) from error


def _id_if_taken(folder: Path, request: Request, error: Exception) -> str:
    """Return the id of an array whose submission may have failed, if Slurm has it.

    Raises:
        VitsweepError: it is not known. The array stays written down: the next command looks it up by
            its batch script, and submits its runs again only where Slurm says that it has none.
    """
    for wait_s in LOOK_UP_AFTER_S:
        time.sleep(wait_s)
        for script, array_id in (submitted_scripts({os.getuid()}) or {}).items():
            if JobArray(folder).owns(script):
                return array_id
    raise VitsweepError(
        f"Slurm did not say whether it took the job array of group {request.name} "
        f"({str(error).strip().splitlines()[-1]}). The same command, typed in a minute, finds out and "
        "submits nothing twice."
    ) from error


def _submit_command(folder: Path, options: dict[str, Any], shell_command: str) -> str:
    """Submit a shell command; the only function that uses a private part of submitit.

    Its public `submit` takes Python functions, which it would pickle.
    """
    from submitit.slurm.slurm import SlurmExecutor

    executor = SlurmExecutor(folder=folder)
    executor.parameters = options
    return str(executor._submit_command(shell_command).job_id)


def parameters(sweep: str, request: Request, settings: SlurmSettings, code: Path) -> dict[str, Any]:
    """Return the options of the batch script by submitit's names; submitit quotes the values."""
    others = {"requeue": True, **settings.additional_parameters}
    cpus = f"--cpus-per-task={request.cpus}"  # srun does not inherit it since Slurm 22.05
    options = {
        "job_name": f"vitsweep-{sweep}",
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "gres": settings.gres,
        "exclusive": settings.exclusive or None,
        "signal_delay_s": settings.signal_delay_s,
        "array_parallelism": settings.array_parallelism,
        "setup": [
            f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            *settings.setup,
        ],
        "srun_args": [cpus, "--cpu-bind=none", "--kill-on-bad-exit=0", *settings.srun_args],
        "stderr_to_stdout": True,
        "additional_parameters": {
            k: v for k, v in others.items() if v is not None and v is not False
        },
    }
    given = {key: value for key, value in options.items() if value is not None}
    return given | request.sbatch(settings)


def command(folder: Path, settings: SlurmSettings, digest: str) -> str:
    """Return the line of shell that every node of a job runs, which Slurm keeps."""
    python: Sequence[str] = (sys.executable,)
    if settings.python is not None:
        python = (settings.python,) if isinstance(settings.python, str) else settings.python
    return shlex.join([*python, "-u", "-P", "-m", AGENT, str(folder), digest, *folder_on_path()])


@contextlib.contextmanager
def environment_of_sbatch(options: Mapping[str, Any], exported: Sequence[str]) -> Iterator[None]:
    """Hide what would change a job, and what no job needs, which Slurm would keep and pass on.

    sbatch takes an option from its command line, else from SBATCH_*, else from the script
    (https://slurm.schedmd.com/sbatch.html, "Input environment variables"). Where the command is typed in
    a job, SLURM_* describe that one. `--export=NAMES` would be no way: with it Slurm loads the environment
    of a login shell on the node.

    Args:
        options: see `parameters`.
        exported: names that jobs get nevertheless.
    """
    is_inside = "SLURM_JOB_ID" in os.environ
    changing = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_") if is_inside else ("SBATCH_",)
    given = {*options, *options["additional_parameters"]}
    kept = {f"SBATCH_{option.upper()}" for option in LEFT_TO_THE_SITE if option not in given}
    hidden = {
        name: value
        for name, value in os.environ.items()
        if (name not in kept | KEPT_IN_A_JOB and name.startswith(changing))
        or (name not in exported and not is_passed_on(name, value))
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def is_passed_on(name: str, value: str) -> bool:
    """Whether a job gets a variable: one of `PASSED_ON` that holds no secret."""
    is_known = PASSED_ON.fullmatch(name) is not None and not SECRET_NAME.search(name)
    return is_known and not SECRET_VALUE.search(value)
