"""Every `auto` gets its value here, once, when the sweep is made; the worker reads only results."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any, get_args

from vitsweep.errors import BadValueError
from vitsweep.spec.data import Data
from vitsweep.spec.from_yaml import part_from_tree, target_class
from vitsweep.spec.measurement import AUTO as AUTO_MEASUREMENT
from vitsweep.spec.measurement import AUTO_STEPS
from vitsweep.spec.resources import AXES, LARGEST_WORLD, Device, Machine
from vitsweep.words import did_you_mean

Tree = dict[str, Any]
AUTO = "auto"


def resolve(tree: Tree, machine: Machine) -> Tree:
    """Return the tree with every `auto` replaced.

    Args:
        tree: composed configuration of one cell; not changed.
        machine: where the cell will run.

    Raises:
        BadValueError: a value cannot be resolved, or `auto` is not allowed where it stands.
    """
    resolved = {key: dict(node) if isinstance(node, dict) else node for key, node in tree.items()}
    for settings in ("resources", "mesh"):  # their choices are shorthands, not what is measured
        resolved[settings].pop("name", None)
    data: Data = part_from_tree(resolved, "data")
    _fill(resolved, "batch", "resolution_px", lambda: data.native_resolution_px)
    _fill(resolved, "model", "in_channels", lambda: data.num_channels)
    _fill(resolved, "model", "num_classes", lambda: data.num_classes)
    _fill(resolved, "model", "frames", lambda: getattr(data, "num_frames", 1))
    _fill(resolved, "model", "text_width", lambda: getattr(data, "text_width", None))
    _fill(resolved, "model", "text_vectors", lambda: getattr(data, "text_vectors", 1))
    _fill(resolved, "model", "version", lambda: _installed(resolved["model"].get("package")))
    if not getattr(target_class(tree["objective"], "objective"), "reads_labels", True):
        _fill(resolved, "task", "label_smoothing", lambda: 0.0)
    for key in ("epochs", "warmup_epochs", "label_smoothing"):
        _fill(resolved, "task", key, partial(resolved["recipe"].get, key))
    resources = resolved["resources"]
    _fill(resolved, "resources", "device", lambda: machine.device)
    if (device := resources.get("device")) not in get_args(Device):
        known = (AUTO, *get_args(Device))
        listed = ", ".join(f"`{each}`" for each in known)
        meant = did_you_mean(str(device), known, lambda name: f"resources.device={name}")
        raise BadValueError(f"`resources.device={device}`: must be one of {listed}{meant}")
    resources["cores_per_node"] = machine.cores_per_node
    resources["devices_per_node"] = machine.devices_per_node
    ranks = resources["ranks_per_node"] = ranks_per_node(resources, machine)
    if resources.get("threads_per_rank") == AUTO and isinstance(ranks, int) and ranks > 0:
        cores = machine.cores_per_node // max(ranks, machine.most_ranks)
        resources["threads_per_rank"] = max(1, cores)
    precision = resolved["precision"]
    # float16 on GPUs as in the blog; bfloat16 on CPUs, where float16 is emulated (25x slower)
    _fill(
        resolved, "precision", "half_dtype", lambda: "float16" if device == "cuda" else "bfloat16"
    )
    is_float16 = precision.get("half_dtype") == "float16"
    _fill(resolved, "precision", "loss_scale", lambda: "dynamic" if is_float16 else None)
    # Adam's second moment is float16 then, whose smallest positive number is 6e-8
    is_half = precision.get("cast_model_type") == "half" and not precision.get("master_weights")
    _fill(resolved, "optimizer", "eps", lambda: 1e-4 if is_half and is_float16 else 1e-8)
    _fill(resolved, "optimizer", "compiled", lambda: device == "cuda")
    optimizer = target_class(resolved["optimizer"], "optimizer")
    keeps_views = getattr(optimizer, "keeps_gradient_views", False)
    _fill(resolved, "sharding", "gradient_as_bucket_view", lambda: not keeps_views)
    if resolved["measurement"].get("measured_steps") == AUTO:
        resolved["measurement"]["measured_steps"] = AUTO_STEPS
    else:
        _fill(resolved, "measurement", "fewest_steps", lambda: 0)
    for key, of_device in AUTO_MEASUREMENT.items():
        _fill(resolved, "measurement", key, partial(of_device.get, device))
    resolved["mesh"] = _resolve_mesh(resolved)
    return resolved


def _fill(tree: Tree, group: str, key: str, value: Callable[[], Any]) -> None:
    if isinstance(tree.get(group), dict) and tree[group].get(key) == AUTO:
        tree[group][key] = value()


def _installed(package: str | None) -> str | None:
    """Return the version of a package; None where it is not installed, which `conflicts` refuses."""
    try:
        return version(package) if package else None
    except PackageNotFoundError:
        return None


def ranks_per_node(node: Tree, machine: Machine) -> Any:
    """Return the ranks per node of a tree's `resources`, with `auto` replaced and nothing checked."""
    if node.get("ranks_per_node") != AUTO:
        return node.get("ranks_per_node")
    device = machine.device if node.get("device") == AUTO else node.get("device")
    return max(1, machine.devices_per_node) if device == "cuda" else 2


def _resolve_mesh(tree: Tree) -> Tree:
    resources, asked = tree["resources"], dict(tree["mesh"])
    for key in ("nodes", "ranks_per_node"):
        if type(resources.get(key)) is not int or resources[key] < 1:
            raise BadValueError(
                f"`resources.{key}={resources.get(key)}`: a whole number of at least 1 is needed."
            )
    world = resources["nodes"] * resources["ranks_per_node"]
    if world > LARGEST_WORLD:
        raise BadValueError(
            f"`resources.nodes={resources['nodes']}` x `resources.ranks_per_node="
            f"{resources['ranks_per_node']}`: at most {LARGEST_WORLD} ranks can train together."
        )
    wrong = {a: d for a, d in asked.items() if d != AUTO and (type(d) is not int or d < 1)}
    if wrong:
        axis, degree = next(iter(wrong.items()))
        raise BadValueError(f"`mesh.{axis}={degree}`: a whole number of at least 1, or `auto`.")
    mesh = {axis: asked.get(axis, AUTO) for axis in AXES if axis != "replicate"}
    open_axes = _open_axes(tree, mesh)
    # one with several axes (USP) splits the ranks, if no other shares them
    for group in _MODEL_PARALLEL:
        technique = target_class(tree[group], group)
        default = getattr(technique, "default_degrees", None)
        if default and sorted(open_axes) == sorted(technique.axes):  # type: ignore[attr-defined]
            mesh |= default(max(1, world // prod(d for d in mesh.values() if d != AUTO)), tree)
    _take(mesh, _open_axes(tree, mesh), world)
    sharding = target_class(tree["sharding"], "sharding")
    if mesh["shard"] == AUTO and "shard" in sharding.axes:  # type: ignore[attr-defined]
        left = max(1, world // prod(d for d in mesh.values() if d != AUTO))
        default = getattr(sharding, "default_shards", None)
        mesh["shard"] = default(left, tree["resources"]) if default else left
    mesh = {axis: 1 if degree == AUTO else degree for axis, degree in mesh.items()}
    replicas, rest = divmod(world, prod(mesh.values()))
    return {**asked, **mesh, "replicate": replicas if not rest else 0}


_MODEL_PARALLEL = ("pipeline_parallel", "sequence_parallel", "tensor_parallel")


def _open_axes(tree: Tree, mesh: Tree) -> list[str]:
    """Axes of model parallelism that a chosen technique uses and nobody gave a degree."""
    wanted = [a for g in _MODEL_PARALLEL for a in target_class(tree[g], g).axes]  # type: ignore[attr-defined]
    return [axis for axis in dict.fromkeys(wanted) if mesh[axis] == AUTO]


def _take(mesh: Tree, open_axes: list[str], world: int) -> None:
    """Give the one axis left at `auto` the ranks that explicit degrees leave; refuse several."""
    if len(open_axes) > 1:
        knobs = ", ".join(f"`mesh.{axis}`" for axis in open_axes)
        raise BadValueError(
            f"The chosen techniques share the {world} ranks: give all but one of {knobs}."
        )
    for axis in open_axes:
        mesh[axis] = max(1, world // prod(d for d in mesh.values() if d != AUTO))
