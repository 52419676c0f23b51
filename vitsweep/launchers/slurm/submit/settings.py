"""Settings of `hydra/launcher=slurm`: of jobs, of packing cells into jobs, and of the site."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from vitsweep.errors import BadValueError
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import hints_of, section_from_tree

Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node of the cluster; `auto` is what Slurm says, whatever the machine where the command is typed.

    Attributes:
        cores_per_node: CPUs of a node as Slurm counts them.
        gpus_per_node: GPUs of a node; cells run on CPUs where it has none.
    """

    cores_per_node: Annotated[int, Gt(0)] | Auto
    gpus_per_node: Annotated[int, Ge(0)] | Auto


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Everything in conf/hydra/launcher/slurm.yaml, where each field is explained."""

    wait: bool
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    gres: str | None
    gpu_type: str | None
    mem_gb: Annotated[float, Gt(0)] | None
    exclusive: bool
    timeout_min: Annotated[int, Gt(0)] | Auto
    signal_delay_s: Annotated[int, Ge(10)]
    array_parallelism: Annotated[int, Gt(0)]
    setup: tuple[str, ...]
    export: tuple[str, ...]
    srun_args: tuple[str, ...]
    python: str | tuple[str, ...] | None
    additional_parameters: dict[str, Any]
    cells_per_job: Annotated[int, Gt(0)] | Auto
    minutes_per_job: Annotated[float, Gt(0)]
    minutes_per_run: Annotated[float, Gt(0)]
    max_attempts: Annotated[int, Gt(0)]
    site: Site


def settings_of(given: Mapping[str, Any]) -> SlurmSettings:
    """Check the launcher's fields and return them typed.

    Raises:
        BadValueError: a field is unknown, missing or has a wrong value; all such are named.
    """
    kinds = hints_of(SlurmSettings)
    texts = {k: str(v) for k, v in given.items() if type(v) is int and kinds.get(k) == (str | None)}
    settings: SlurmSettings = section_from_tree(SlurmSettings, {**given, **texts}, "hydra.launcher")
    _check_texts(settings)
    if "time" in settings.additional_parameters:
        raise BadValueError(
            f"`hydra.launcher.additional_parameters.time={settings.additional_parameters['time']}`: the time "
            "limit of a job, before which it saves, is `hydra.launcher.timeout_min=MINUTES`: use that."
        )
    return settings


def _check_texts(settings: SlurmSettings) -> None:
    """Refuse texts that would not arrive as typed: line ends cut a batch script, Slurm drops backslashes."""
    for name, value in vars(settings).items():
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for text in parts if isinstance(parts, list | tuple) else [parts]:
            unfit = isinstance(text, str) and [c for c in text if ord(c) < 32 or c == "\\"]
            if unfit and (name != "setup" or set(unfit) != {"\\"}):
                raise BadValueError(
                    f"`hydra.launcher.{name}={text!r}` holds a backslash, a line end or another control "
                    "character, which an option of a batch script cannot carry: remove it."
                )


# The resources that a job requests: cells with the same request share arrays and allocations.


OVERHEAD_GIB_PER_RANK = 1.0
"""Interpreter, torch and its libraries, besides a rank's budget of model memory."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Resources of one job.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: processes of a cell on each node.
        cpus: CPUs on each node.
        gpus: GPUs on each node, 0 where cells run on CPUs.
        memory_gib: memory on each node in GiB, or None for the partition's default.
        minutes: time limit in minutes.
    """

    nodes: int
    ranks_per_node: int
    cpus: int
    gpus: int
    memory_gib: float | None
    minutes: int

    @property
    def name(self) -> str:
        """Short name for folders and tables."""
        return f"n{self.nodes}x{self.ranks_per_node}"

    def sbatch(self, settings: SlurmSettings) -> dict[str, Any]:
        """Return the options of sbatch that are set, by submitit's names.

        One task per node: an agent starts the node's ranks, so that torch is loaded once per node and
        all ranks see all granted GPUs, which peer-to-peer copies between them need.
        """
        gpus = f"{settings.gpu_type}:{self.gpus}" if settings.gpu_type else self.gpus
        options = {
            "nodes": self.nodes,
            "ntasks_per_node": 1,
            "cpus_per_task": self.cpus,
            "gpus_per_node": gpus if self.gpus and not settings.gres else None,
            "mem": None if self.memory_gib is None else f"{math.ceil(self.memory_gib * 1024)}MB",
            "time": self.minutes,
        }
        return {key: value for key, value in options.items() if value is not None}

    def for_work_of(self, minutes: float, settings: SlurmSettings) -> "Request":
        """Return it with a time limit for so many minutes of work, where the limit is `auto`.

        What is left for one run until its own timeout stays, so that a run that hangs is `timed_out`
        and not cut off with its job.
        """
        saved = max(0, math.floor(settings.minutes_per_job - minutes))
        return (
            replace(self, minutes=self.minutes - saved) if settings.timeout_min == "auto" else self
        )


def request_of(cell: CellSpec, settings: SlurmSettings) -> Request:
    """Return what a cell requests."""
    resources = cell.resources
    memory = settings.mem_gb
    if resources.memory_gib_per_rank is not None:
        per_rank = resources.memory_gib_per_rank + OVERHEAD_GIB_PER_RANK
        memory = max(memory or 0, resources.ranks_per_node * per_rank)
    return Request(
        nodes=resources.nodes,
        ranks_per_node=resources.ranks_per_node,
        cpus=min(resources.cores_per_node, resources.ranks_per_node * resources.threads_per_rank),
        gpus=resources.ranks_per_node if resources.device == "cuda" else 0,
        memory_gib=memory,
        minutes=_minutes(cell, settings),
    )


def _minutes(cell: CellSpec, settings: SlurmSettings) -> int:
    """Return the time limit in minutes; auto: the planned work of a job and one run until its timeout."""
    if settings.timeout_min != "auto":
        return settings.timeout_min
    return math.ceil(settings.minutes_per_job + cell.measurement.timeout_min)


def groups(
    entries: Iterable[PlannedCell], settings: SlurmSettings
) -> dict[Request, list[PlannedCell]]:
    """Return the cells by what they request."""
    found: dict[Request, list[PlannedCell]] = {}
    for entry in entries:
        found.setdefault(request_of(entry.spec, settings), []).append(entry)
    return found
