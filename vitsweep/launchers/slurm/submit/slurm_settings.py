"""Settings of `hydra/launcher=slurm`: of jobs, of packing cells into jobs, and of the site."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from vitsweep.errors import BadValueError
from vitsweep.launchers.local_settings import check_objective
from vitsweep.spec.from_yaml import section_from_tree

Auto = Literal["auto"]

FOLLOWS_THE_CELL = {
    "nodes": "resources.nodes",
    "tasks_per_node": "resources.ranks_per_node",
    "gpus_per_node": "resources.ranks_per_node",
    "cpus_per_task": "resources.threads_per_rank",
}
"""Fields of hydra-submitit-launcher that belong to the cell here, and so can be swept."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A node of the cluster; `auto` is what Slurm says, whatever the machine where the command is typed.

    Attributes:
        device: `cuda` or `cpu`; auto = `cuda` where the nodes have GPUs.
        cores_per_node: CPUs of a node as Slurm counts them.
        gpus_per_node: GPUs of a node.
        max_array_size: Slurm's MaxArraySize; larger groups are cut into several arrays.
    """

    device: Literal["cpu", "cuda"] | Auto
    cores_per_node: Annotated[int, Gt(0)] | Auto
    gpus_per_node: Annotated[int, Ge(0)] | Auto
    max_array_size: Annotated[int, Gt(1)] | Auto


@dataclass(frozen=True, kw_only=True)
class _WithoutSite:
    """The fields of the launcher that are values."""

    wait: bool
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    exclude: str | None
    reservation: str | None
    comment: str | None
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
    pair: bool
    max_attempts: Annotated[int, Gt(0)]
    objective: str


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(_WithoutSite):
    """Everything in conf/hydra/launcher/slurm.yaml, where each field is explained."""

    site: Site


def settings_of(given: Mapping[str, Any]) -> SlurmSettings:
    """Check the launcher's fields and return them typed.

    Raises:
        BadValueError: a field is unknown, missing or has a wrong value; all such are named.
    """
    for key in FOLLOWS_THE_CELL.keys() & given.keys():
        raise BadValueError(
            f"`hydra.launcher.{key}`: with `hydra/launcher=slurm` resources follow the cell; set or "
            f"sweep `{FOLLOWS_THE_CELL[key]}`."
        )
    values = {key: value for key, value in given.items() if key != "site"}
    site = section_from_tree(Site, given.get("site", {}), "hydra.launcher.site")
    rest = section_from_tree(_WithoutSite, values, "hydra.launcher")
    settings = SlurmSettings(site=site, **vars(rest))
    check_objective(settings.objective)
    _check_texts(settings)
    return settings


def _check_texts(settings: SlurmSettings) -> None:
    """Refuse texts that would not arrive as typed: line ends cut a batch script, Slurm drops backslashes."""
    for name, text in _texts(settings):
        if any(ord(character) < 32 for character in text):
            raise BadValueError(
                f"`hydra.launcher.{name}={text!r}` holds a line end or another control character, "
                "which a batch script cannot carry: remove it."
            )
        if "\\" in text and name != "setup":
            raise BadValueError(
                f"`hydra.launcher.{name}={text}` holds a backslash, which Slurm drops from the "
                "options of a batch script: remove it."
            )


def _texts(settings: SlurmSettings) -> list[tuple[str, str]]:
    texts = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        parts: list[Any] = [value]
        if isinstance(value, tuple):
            parts = list(value)
        elif isinstance(value, dict):
            parts = [*value, *value.values()]
        texts += [(field.name, part) for part in parts if isinstance(part, str)]
    return texts
