"""Slurm's commands, run with a time limit; one that is missing or does not answer is no error."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitsweep.console import captured
from vitsweep.errors import VitsweepError
from vitsweep.rates.profile import most_usable_bytes, profiles_of_type
from vitsweep.spec.resources import Machine

if TYPE_CHECKING:
    from vitsweep.launchers.slurm.submit.settings import SlurmSettings

TIMEOUT_SECONDS = 20
LIVE_STATES = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING "
    "SIGNALING STAGE_OUT STOPPED SPECIAL_EXIT RESV_DEL_HOLD".split()
)
"""States in which a job may still run; every other state is final."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What Slurm says about one job of an array.

    Attributes:
        state: as Slurm names it, such as `RUNNING`.
        reason: why it waits, or how it ended.
        exit_code: of the batch script, where known.
        restarts: how often Slurm has requeued it; a requeued job has one more than it started with.
        script: path of its batch script, "" where unknown; ids are reused after a crash, scripts not.
    """

    state: str
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    script: str = ""

    @property
    def is_live(self) -> bool:
        """Whether it may still run."""
        return self.state in LIVE_STATES


def _run(*command: str) -> "subprocess.CompletedProcess[str] | None":
    environ = os.environ | {"SLURM_BITSTR_LEN": "0"}  # ranges of array indices in full
    try:
        return captured(command, timeout=TIMEOUT_SECONDS, env=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None


def slurm_output(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing, fails or does not answer."""
    done = _run(*command)
    return done.stdout if done is not None and done.returncode == 0 else None


_SETTINGS: dict[str, str] = {}
"""slurm.conf, once the controller has answered: a command asks it once."""


def controller_settings() -> dict[str, str]:
    """Return slurm.conf as the controller has read it; {} where it does not answer."""
    if not _SETTINGS:
        lines = (slurm_output("scontrol", "show", "config") or "").splitlines()
        pairs = (line.partition("=") for line in lines)
        _SETTINGS.update({key.strip(): value.strip() for key, equals, value in pairs if equals})
    return dict(_SETTINGS)


def require_slurm() -> None:
    """Stop where nothing can be submitted.

    Raises:
        VitsweepError: there is no `sbatch`.
    """
    if not shutil.which("sbatch"):
        raise VitsweepError(
            "`hydra/launcher=slurm` needs Slurm's client commands and there is no `sbatch` here: "
            "type the command on a login node, or use `hydra/launcher=local`."
        )


def squeue(array_ids: set[str]) -> dict[str, SlurmJob] | None:
    """Return `<array>_<index>` -> job as the controller knows it; None where it does not answer.

    Jobs are asked for by id, so that they are found whoever asks.
    """
    if not array_ids:
        return {}
    ids = ",".join(sorted(array_ids))
    done = _run("squeue", "-j", ids, "-h", "-r", "-t", "all", "-O", _SQUEUE_FIELDS)
    if done is None or (done.returncode and "Invalid job id" not in done.stderr):
        return None
    jobs = {}
    for line in done.stdout.splitlines():
        array, index, state, reason, code, restarts, script = map(str.strip, line.split("|", 6))
        if array in array_ids:
            jobs[f"{array}_{index}"] = SlurmJob(
                state=state,
                reason=reason,
                exit_code=_exit_code(code, state),
                restarts=int(restarts),
                script=script,
            )
    return jobs


_SQUEUE_FIELDS = (
    "ArrayJobID: |,ArrayTaskID: |,State: |,Reason: |,exit_code: |,RestartCnt: |,Command: "
)


def submitted_scripts(users: Collection[int]) -> dict[str, str] | None:
    """Return path of the batch script -> array id of some users' jobs; None without an answer."""
    of_users = f"--user={','.join(map(str, users))}"
    shown = slurm_output("squeue", of_users, "-h", "-t", "all", "-O", "ArrayJobID: |,Command: ")
    if shown is None:
        return None
    lines = (line.partition("|") for line in shown.splitlines())
    return {script.strip(): array.strip() for array, _, script in lines}


def _exit_code(wait_status: str, state: str) -> int | None:
    """Read what squeue shows, which is a status as the system call `wait` returns it."""
    if state in LIVE_STATES or not wait_status.isdigit():
        return None
    return int(wait_status) >> 8


def release(job_id: str) -> None:
    """Let a held job start again, where Slurm allows it."""
    slurm_output("scontrol", "release", job_id)


def scancel(job_ids: list[str]) -> str:
    """Cancel arrays or single jobs of arrays; return Slurm's error messages.

    Raises:
        VitsweepError: there is no `scancel` here, or it does not answer.
    """
    errors = []
    for start in range(0, len(job_ids), 500):  # command lines have a limit
        done = _run("scancel", *job_ids[start : start + 500])
        if done is None:
            raise VitsweepError(
                f"`scancel` is missing on this machine or does not answer within {TIMEOUT_SECONDS} s: "
                "it may have cancelled nothing, or part of the jobs. Type the same command again, on a "
                "login node of the cluster."
            )
        errors.append(done.stderr.strip())
    return "\n".join(filter(None, errors))


# CPUs and GPUs of the cluster's nodes, as Slurm knows them; a login node may differ.


Kind = tuple[int, int]
"""CPUs and GPUs of a node."""


def machine_of(settings: "SlurmSettings") -> Machine:
    """Return the machine on which cells are planned: one node of the partition.

    Raises:
        VitsweepError: Slurm does not answer, or the partition has several kinds of nodes and the
            profile does not say which is meant.
    """
    site = settings.site
    described = site.cores_per_node, site.gpus_per_node
    found = described if "auto" not in described else _only_kind(settings)
    cores, gpus = (b if a == "auto" else a for a, b in zip(described, found, strict=True))
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    if settings.gpu_type and not gpus:
        raise VitsweepError(
            f"`hydra.launcher.gpu_type={settings.gpu_type}`: the nodes of partition "
            f"`{settings.partition or '(default)'}` have no GPU: leave it out, or describe them with "
            "`hydra.launcher.site.gpus_per_node`."
        )
    types = sorted(_gpu_types(settings)) if device == "cuda" else []
    most = [most_usable_bytes(each) for each in types]
    profiles = [profile for each in types for profile in profiles_of_type(each)]
    is_known = bool(types) and None not in most
    tf32 = {profile.has_tf32 for profile in profiles}
    return Machine(
        device=device,
        cores_per_node=int(cores),
        devices_per_node=int(gpus),
        described_by=f"partition {settings.partition or '(default)'}",
        gib_per_device=max(filter(None, most)) / 2**30 if is_known else None,
        least_gib=min(p.usable_bytes for p in profiles) / 2**30 if is_known else None,
        has_tf32=all(tf32) if is_known and None not in tf32 else None,
        profiles=tuple(profile.name for profile in profiles) if is_known else (),
    )


def _gpu_types(settings: "SlurmSettings") -> set[str]:
    """Return the types of the GPUs that a job may get.

    They are what `hydra.launcher.gpu_type` or `gres` names, else those of the partition's nodes.
    """
    if settings.gpu_type:
        return {settings.gpu_type}
    if settings.gres:
        return gpu_types_in(settings.gres)
    where = ("-p", settings.partition) if settings.partition else ()
    shown = slurm_output("sinfo", "-h", *where, "-o", "%G") or ""
    return set().union(*(gpu_types_in(line) for line in shown.splitlines()))


def _only_kind(settings: "SlurmSettings") -> Kind:
    where = ("-p", settings.partition) if settings.partition else ()
    shown = slurm_output("sinfo", "-h", *where, "-o", "%c|%G|%f|%P")
    if shown is None:
        require_slurm()
        raise VitsweepError(
            "`sinfo` does not answer, so the nodes are unknown: check `sinfo` by hand, or describe "
            "them with `hydra.launcher.site.cores_per_node` and `hydra.launcher.site.gpus_per_node`."
        )
    lines = [line.split("|") for line in shown.splitlines()]
    if not where:
        lines = [line for line in lines if line[3].endswith("*")]  # the default partition
    kinds = _kinds(lines, settings.constraint)
    if len(kinds) == 1:
        return kinds.pop()
    if not kinds and lines:
        raise _no_such("constraint", settings.constraint, (line[2] for line in lines))
    if not kinds and where:
        names = (slurm_output("sinfo", "-h", "-o", "%R") or "").splitlines()
        raise _no_such("partition", settings.partition, names)
    found = "; ".join(f"{cores} CPUs and {gpus} GPUs" for cores, gpus in sorted(kinds)) or "none"
    raise VitsweepError(
        f"The partition `{settings.partition or '(default)'}` has nodes of these kinds: {found}. Say "
        "which is meant with `hydra.launcher.partition`, `hydra.launcher.constraint`, or "
        "`hydra.launcher.site.cores_per_node` and `hydra.launcher.site.gpus_per_node`."
    )


def _no_such(key: str, typed: str | None, lists: Iterable[str]) -> VitsweepError:
    names = sorted({name for each in lists for name in each.split(",")})
    return VitsweepError(
        f"`hydra.launcher.{key}={typed}`: no node has it; there is {', '.join(names) or 'none'}."
    )


def _kinds(lines: Iterable[list[str]], constraint: str | None) -> set[Kind]:
    """Keep nodes with the feature `constraint`; expressions such as `a&b` are left to Slurm."""
    plain = constraint is not None and re.fullmatch(r"[\w.-]+", constraint)
    return {
        (int(cpus.rstrip("+")), gpus_in(gres))
        for cpus, gres, features, _ in lines
        if not plain or constraint in features.split(",")
    }


def gpus_in(gres: str) -> int:
    """Count the GPUs of a generic-resource text such as `gpu:h100:8(S:0-1),nvme:1`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres)
    return sum(map(int, counts))


def gpu_types_in(gres: str) -> set[str]:
    """Return the types of GPUs that such a text names; "" stands for GPUs without a type."""
    return set(re.findall(r"(?:^|,)gpu(?::([^:,(]*[^:,(\d][^:,(]*))?(?=[:,(]|$)", gres))
