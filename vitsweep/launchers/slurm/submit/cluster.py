"""CPUs and GPUs of the cluster's nodes, as Slurm knows them; a login node may differ."""

import re
from collections.abc import Iterable
from typing import Literal

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.state.slurm_cli import controller_settings, slurm_output
from vitsweep.launchers.slurm.submit.slurm_settings import SlurmSettings
from vitsweep.predict.hardware import most_usable_bytes
from vitsweep.spec.machine import Machine

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's own default, used where the controller does not say."""

Kind = tuple[int, int]
"""CPUs and GPUs of a node."""


def machine_of(settings: SlurmSettings) -> Machine:
    """Return the machine on which cells are planned: one node of the partition.

    Raises:
        VitsweepError: Slurm does not answer, or the partition has several kinds of nodes and the
            profile does not say which is meant.
    """
    site = settings.site
    described = site.cores_per_node, site.gpus_per_node
    cores, gpus = described if "auto" not in described else _only_kind(settings)
    cores = cores if site.cores_per_node == "auto" else site.cores_per_node
    gpus = gpus if site.gpus_per_node == "auto" else site.gpus_per_node
    device: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    if site.device != "auto":
        device = site.device
    return Machine(
        device=device,
        cores_per_node=int(cores),
        devices_per_node=int(gpus) if device == "cuda" else 0,
        described_by=f"partition {settings.partition or '(default)'}",
        gib_per_device=_gib_per_gpu(settings) if device == "cuda" else None,
    )


def _gib_per_gpu(settings: SlurmSettings) -> float | None:
    """Return the memory of the largest GPU that a job may get; None where one of them is unknown.

    The type is what `hydra.launcher.gpu_type` or `gres` names, else those of the partition's nodes.
    """
    if settings.gpu_type:
        types = {settings.gpu_type}
    elif settings.gres:
        types = gpu_types_in(settings.gres)
    else:
        where = ("-p", settings.partition) if settings.partition else ()
        shown = slurm_output("sinfo", "-h", *where, "-o", "%G") or ""
        types = set().union(*(gpu_types_in(line) for line in shown.splitlines()))
    sizes = [most_usable_bytes(each) for each in types]
    known = [size for size in sizes if size is not None]
    return max(known) / 2**30 if known and len(known) == len(sizes) else None


def _only_kind(settings: SlurmSettings) -> Kind:
    where = ("-p", settings.partition) if settings.partition else ()
    shown = slurm_output("sinfo", "-h", *where, "-o", "%c|%G|%f|%P")
    if shown is None:
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
    if not kinds:
        raise VitsweepError(
            f"No node is in `hydra.launcher.partition={settings.partition}` with "
            f"`hydra.launcher.constraint={settings.constraint}`; `sinfo -s` lists the partitions."
        )
    found = "; ".join(f"{cores} CPUs and {gpus} GPUs" for cores, gpus in sorted(kinds))
    raise VitsweepError(
        f"The partition `{settings.partition or '(default)'}` has nodes of these kinds: {found}. Say "
        "which is meant with `hydra.launcher.partition`, `hydra.launcher.constraint`, or "
        "`hydra.launcher.site.cores_per_node` and `hydra.launcher.site.gpus_per_node`."
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


def max_array_size(settings: SlurmSettings) -> int:
    """Return how many jobs an array may have; Slurm's limit is one more than the highest index."""
    if settings.site.max_array_size != "auto":
        return settings.site.max_array_size
    return int(controller_settings().get("MaxArraySize", DEFAULT_MAX_ARRAY_SIZE))
