"""What cannot run, with every reason, before a process starts or a job is queued."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Literal

from vitsweep import extras
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import wrong_function
from vitsweep.spec.measurement import AT_MOST, AUTO
from vitsweep.spec.resources import AXES, TOKEN_AXES


def conflicts(cell: CellSpec) -> list[str]:
    """Return all reasons why a cell cannot run; empty means that it can.

    Raises:
        BadValueError: the rule of a technique raises.
    """
    own = [
        _mesh(cell),
        _axes(cell),
        _devices(cell),
        _threads(cell),
        _shapes(cell),
        _batch(cell),
        _measurement(cell),
        cell.model.conflicts(cell),
        cell.data.conflicts(cell),
        cell.task.conflicts(),
        cell.objective.conflicts(cell),
        wrong_function("task.held_out", cell.task.held_out, "outputs and batch"),
        cell.recipe.conflicts(cell),
    ]
    parts = [*own, technique_conflicts(cell)]
    return list(dict.fromkeys(reason for part in parts for reason in part))


def technique_conflicts(cell: CellSpec) -> list[str]:
    """Return why the techniques of a cell cannot work on its mesh, devices and model.

    Raises:
        BadValueError: the rule of a technique raises.
    """
    refused = cell.model.refused(cell)
    chosen = [
        said_by(cell, group, "conflicts") for group in cell.techniques if group not in refused
    ]
    parts = [_mesh(cell), _axes(cell), _devices(cell), refused.values(), *chosen]
    return list(dict.fromkeys(reason for part in parts for reason in part))


def lacking_here(cell: CellSpec) -> Iterator[str]:
    """Yield all reasons why this machine cannot run a cell that others can.

    Raises:
        BadValueError: the rule of a technique raises.
    """
    for group in cell.techniques:
        yield from said_by(cell, group, "lacking_here")


def said_by(cell: CellSpec, group: str, rule: Literal["conflicts", "lacking_here"]) -> list[str]:
    """Return the reasons that one rule of a technique itself gives against a cell.

    Raises:
        BadValueError: the rule, which may be a user's, raises or gives something else than texts.
    """
    technique = cell.techniques[group]
    try:
        said = list(getattr(technique, rule)(cell))
        fault = "" if all(isinstance(text, str) for text in said) else f"yielded {said!r:.80}"
    except VitsweepError:
        raise
    except Exception as error:
        said, fault = [], f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    if fault:
        kind = type(technique)
        raise BadValueError(
            f"`{group}={technique.name}`: `{kind.__module__}.{kind.__qualname__}.{rule}` {fault}, but must "
            f"yield sentences: mend it, or choose another `{group}`."
        )
    return said


def _mesh(cell: CellSpec) -> Iterator[str]:
    mesh, world = cell.mesh, cell.resources.world_size
    if mesh.world_size != world:
        degrees = {a: d for a, d in vars(mesh).items() if d > 1 and a != "replicate"}
        given = " ".join(f"mesh.{axis}={degree}" for axis, degree in degrees.items())
        yield f"`{given}` does not divide the {world} ranks: choose degrees whose product does."


def _axes(cell: CellSpec) -> Iterator[str]:
    """Refuse a degree that no technique uses: its ranks would repeat the same work."""
    used = {axis for technique in cell.techniques.values() for axis in technique.axes}
    for axis in ("pipeline", *TOKEN_AXES, "tensor"):
        degree = getattr(cell.mesh, axis)
        if degree > 1 and axis not in used:
            group = "sequence_parallel" if axis in TOKEN_AXES else f"{axis}_parallel"
            yield (
                f"`mesh.{axis}={degree}` is not used by `{group}={getattr(cell, group).name}`: leave it "
                f"at auto, or choose another `{group}`."
            )


def _devices(cell: CellSpec) -> Iterator[str]:
    asked = cell.resources
    if asked.device != "cuda":
        return
    if not asked.devices_per_node:
        yield (
            "`resources.device=cuda` needs a GPU, which is not here: use `resources.device=cpu`, or "
            "`hydra/launcher=slurm`."
        )
    elif asked.ranks_per_node > asked.devices_per_node:
        yield (
            f"`resources.ranks_per_node={asked.ranks_per_node}` is more than the GPUs of a node: use "
            f"`resources.ranks_per_node={asked.devices_per_node}`."
        )


MOST_THREADS_PER_CORE = 64
"""More of them measure nothing, and may take from a machine all that it can start."""


def _threads(cell: CellSpec) -> Iterator[str]:
    asked = cell.resources
    threads = asked.ranks_per_node * asked.threads_per_rank
    most = MOST_THREADS_PER_CORE * asked.cores_per_node
    if threads > most:
        yield (
            f"`resources.ranks_per_node={asked.ranks_per_node}` x `resources.threads_per_rank="
            f"{asked.threads_per_rank}` is more than {most} threads on {asked.cores_per_node} cores: "
            "use fewer."
        )
    elif asked.threads_per_rank > asked.cores_per_node:
        yield (
            f"`resources.threads_per_rank={asked.threads_per_rank}` is more than the {asked.cores_per_node} "
            f"cores of a node: use `resources.threads_per_rank={asked.cores_per_node}`."
        )


def _shapes(cell: CellSpec) -> Iterator[str]:
    model = cell.model
    if model.in_channels != cell.data.num_channels:
        yield (
            f"`model.in_channels={model.in_channels}` does not fit the {cell.data.num_channels} of "
            f"`data={cell.data.name}`: use `model.in_channels=auto`."
        )
    if model.num_classes < cell.data.num_classes:
        yield (
            f"`model.num_classes={model.num_classes}` is fewer than the {cell.data.num_classes} of "
            f"`data={cell.data.name}`: use `model.num_classes=auto`."
        )
    elif cell.task.epochs and model.num_classes != cell.data.num_classes:
        yield (
            f"`model.num_classes={model.num_classes}` is more than the {cell.data.num_classes} of "
            f"`data={cell.data.name}`: use `model.num_classes=auto`."
        )


def _batch(cell: CellSpec) -> Iterator[str]:
    replicas, steps = cell.mesh.data_parallel_size, cell.batch.accumulation_steps
    if not replicas or cell.images_per_step % (replicas * steps) == 0:
        return
    share = steps if cell.batch.scope == "per_replica" else replicas * steps
    fewer = max(share, cell.batch.images_per_step // share * share)  # more may be too many
    yield (
        f"`batch.images_per_step={cell.batch.images_per_step}` (`batch.scope={cell.batch.scope}`) "
        f"does not split evenly over {replicas} replicas x "
        f"`batch.accumulation_steps={steps}`: try `batch.images_per_step={fewer}`."
    )


def _measurement(cell: CellSpec) -> Iterator[str]:
    for least, most in AT_MOST.items():
        low, high = getattr(cell.measurement, least), getattr(cell.measurement, most)
        if low > high and low != AUTO.get(least, {}).get(cell.resources.device):
            yield (
                f"`measurement.{least}={low:g}` is more than `measurement.{most}={high:g}`: use "
                f"`measurement.{least}={high:g}`, or a larger `measurement.{most}`."
            )
    for feature in extras.KNOWN.values():
        for key in feature.instruments.keys() - extras.INSTRUMENTS.keys():
            if value := getattr(cell.measurement, key):
                yield f"`measurement.{key}={value}` needs a feature that is not installed: leave it out."
    if cell.measurement.start == "forked" and cell.runtime.rank_environment:
        yield (
            "`measurement.start=forked` begins ranks after their environment is fixed, and "
            "`runtime.variables` must be in it: leave it at auto, or use `measurement.start=spawned`."
        )


def largest_degree(cell: CellSpec, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest degree up to `most` that fits and whose mesh still divides the world.

    Args:
        cell: the cell.
        most: degree of the axis in the cell; what is taken from it goes to the replicas.
        fits: whether a degree does what the technique needs.
    """
    degrees = zip(AXES, cell.mesh.degrees(), strict=True)
    others = prod(degree for axis, degree in degrees if axis != "replicate") // most
    ranks = max(1, cell.resources.world_size // others)
    return max(d for d in range(1, most + 1) if ranks % d == 0 and fits(d))


def tensor_split_conflicts(cell: CellSpec, choice: str) -> Iterator[str]:
    """Yield why the matrices of a block cannot be split over `mesh.tensor` ranks.

    Args:
        cell: the cell.
        choice: the technique that splits them, as typed (`tensor_parallel=megatron`).
    """
    ways, heads, hidden = cell.mesh.tensor, cell.transformer.num_heads, cell.transformer.mlp_width
    if heads % ways or hidden % ways:
        fits = largest_degree(cell, ways, lambda d: heads % d == 0 == hidden % d)
        yield (
            f"`mesh.tensor={ways}` of `{choice}` must divide `model.num_heads={heads}` and "
            f"`model.mlp_width={hidden}`: try `mesh.tensor={fits}`."
        )
    if cell.precision.float8:
        yield (
            f"`{choice}` splits no linears of `precision={cell.precision.name}`: use another precision."
        )
