"""Building a module of the user's, and finding what it stacks (needs torch)."""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from vitsweep.errors import BadValueError
from vitsweep.model.block import mark_blocks
from vitsweep.model.initialize import WRAPPERS
from vitsweep.model.module_factory import ModuleFactory
from vitsweep.model.module_look import (
    Look,
    as_it_was,
    differentiable,
    listed,
    logits_of,
    look_at,
    outputs_of,
    set_to_train,
    shapeless,
    shortened,
    shown,
)
from vitsweep.spec.from_yaml import imported_function, wrong_function
from vitsweep.spec.generators import set_generators

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


LAZY = "has parameters without a shape, in {}: pass one batch through it first."
MOST_CANDIDATES = 8
AUTO = "auto"

_LOOKS: dict[tuple[str, int, str | None], tuple[tuple[str, ...], Look]] = {}


def build_module(spec: ModuleFactory, resolution_px: int) -> nn.Module:
    """Call the factory on torch's default device, and mark the blocks of the module it returns.

    The module is ready to train: see `set_to_train`.

    Raises:
        BadValueError: the target cannot be imported or called, returns no module, or the module has
            no blocks at `model.blocks`.
    """
    module = _called(spec, resolution_px)
    set_to_train(module)
    mark_blocks(find_blocks(module, spec))
    if spec.output is not None:
        module.register_forward_hook(_Output(spec.output, spec.typed))
    return module


class _Output:
    """A hook that returns the part of what a module returns that holds the logits."""

    def __init__(self, name: str | int, typed: str) -> None:
        self.name, self.typed = name, typed

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        name = self.name
        if isinstance(outputs, Mapping):  # its keys alone: `values` is an attribute of every dict
            if name in outputs:
                return outputs[name]
        elif isinstance(name, str):
            if hasattr(outputs, name):
                return getattr(outputs, name)
        elif isinstance(outputs, (tuple, list)) and -len(outputs) <= name < len(outputs):
            return outputs[name]
        raise BadValueError(
            f"`model.output={name}` is no part of what `{self.typed}` returned, {_described(outputs)}: name "
            "the key, place (from 0) or attribute that holds the logits, or none of a tensor."
        )


def _described(outputs: Any) -> str:
    """Return what a module returned: its type with its shape, keys, length or attributes."""
    kind = type(outputs).__name__
    if isinstance(outputs, torch.Tensor):
        return f"a tensor {tuple(outputs.shape)}"
    if isinstance(outputs, Mapping):
        return f"{kind} with the keys {listed(list(outputs))}"
    if isinstance(outputs, (tuple, list)):
        return f"{kind} of length {len(outputs)}"
    attributes = [name for name in getattr(outputs, "__dict__", {}) if not name.startswith("_")]
    return f"{kind} with the attributes {listed(attributes)}" if attributes else kind


def _called(spec: ModuleFactory, resolution_px: int) -> nn.Module:
    try:
        with torch.device("cpu"):  # for constants of its module, which stay in the process
            factory = spec.factory()
    except Exception as error:  # the module is the user's
        raise BadValueError(
            f"`model.target={spec.target}` cannot be imported ({type(error).__name__}: {error})."
        ) from error
    try:
        module = spec.call(factory, resolution_px)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and spec.package:
            own = f"'vitsweep[{spec.package}]'" if error.name == spec.package else error.name
            raise BadValueError(
                f"`{spec.typed}` needs the package {error.name}, which is not installed: "
                f"`pip install {own}`."
            ) from error
        if isinstance(error, OSError) and "/" in spec.name:
            raise BadValueError(
                f"`{spec.typed}` cannot be read ({shortened(str(error))}): without network give the folder "
                "of a configuration, or a type of model, such as `model.name=vit`."
            ) from error
        raise BadValueError(
            f"`{spec.typed}` raised {type(error).__name__} with the arguments {spec.arguments} "
            f"({shortened(str(error))}): mend it, or `model.arguments`."
        ) from error
    if not isinstance(module, nn.Module):
        raise BadValueError(
            f"`{spec.typed}` returned a value of type {type(module).__name__}, which is no "
            "`torch.nn.Module`: name a function or class that returns one."
        )
    if lazy := shapeless(module):
        raise BadValueError(f"`{spec.typed}` {LAZY.format(listed(lazy))}")
    return module


def find_blocks(module: nn.Module, spec: ModuleFactory) -> list[nn.Module]:
    """Return the modules that `model.blocks` names; with `auto` none where nothing is stacked.

    Raises:
        BadValueError: there is nothing at the path, or parts of other blocks; the paths
            of stacked modules are named.
    """
    found = stacks(module)
    if spec.blocks == AUTO:
        largest = max(found, key=lambda path: _size(found[path]), default=None)
        return found[largest] if largest is not None else []
    paths = (spec.blocks,) if isinstance(spec.blocks, str) else spec.blocks
    named = {name: part for name, part in module.named_modules() if name}
    at_path = {path: _outermost(fnmatch.filter(named, path)) for path in paths}
    items = {id(block) for blocks in found.values() for block in blocks}

    def at(path: str, name: str) -> list[nn.Module]:
        is_block = "*" in path and name not in found and id(named[name]) in items
        return [named[name]] if is_block else _children(named[name])

    blocks = {p: [b for n in names for b in at(p, n)] for p, names in at_path.items()}
    every = dict.fromkeys(chain.from_iterable(blocks.values()))
    inner = {part for block in every for part in block.modules() if part is not block}
    if lacking := [path for path in paths if not blocks[path] or inner.intersection(blocks[path])]:
        fault = "holds no modules in" if at_path[lacking[0]] else "is no part of"
        fault = "names parts of other blocks in" if blocks[lacking[0]] else fault
        listed = ", ".join(
            f"`{path}` ({len(found[path])} x {type(found[path][0]).__name__})"
            for path in list(found)[:MOST_CANDIDATES]
        )
        there = f"it stacks modules at {listed}" if listed else "it stacks no modules of one class"
        raise BadValueError(f"`model.blocks={lacking[0]}` {fault} `{spec.typed}`: {there}.")
    return list(every)


def _outermost(names: list[str]) -> list[str]:
    """Return the paths of modules that lie in no other of these modules; outer ones come first."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        if not any(".".join(parts[:n]) in found for n in range(1, len(parts))):
            found[name] = None
    return list(found)


def stacks(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Return path -> children of every list of at least two modules of one class with parameters."""
    found = {}
    for path, container in module.named_modules():
        children = _children(container)
        is_list = isinstance(container, nn.ModuleList | nn.Sequential) and len(children) > 1
        if is_list and len({type(c) for c in children}) == 1 and _size(children):
            found[path] = children
    return found


def _children(container: nn.Module) -> list[nn.Module]:
    """Return the children of a container, and in place of lists in it, which nobody calls, theirs."""
    return [
        block
        for child in container.children()
        for block in (_children(child) if isinstance(child, nn.ModuleList) else [child])
    ]


def _size(modules: list[nn.Module]) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())


def problems(spec: ModuleFactory, cell: "CellSpec", *, run: bool = True) -> tuple[str, ...]:
    """Build the module on `meta` and pass images through it; return what is wrong.

    A module that cannot be built or run on `meta` is built and run on the host.

    Args:
        spec: of the module.
        cell: gives the side of the images, and a loss of the user's.
        run: pass images through it, and do not only build it.
    """
    resolution_px = cell.batch.resolution_px
    if run:
        return _looked_at(spec, resolution_px, cell.loss_function)[0]
    try:
        with as_it_was():
            without_weights(spec, resolution_px)
    except BadValueError as error:
        return (str(error),)
    return ()


def look_of(spec: ModuleFactory, resolution_px: int, loss: str | None = None) -> Look:
    """Return what one training pass shows; an empty `Look` where there was none.

    Args:
        spec: of the module.
        resolution_px: side of the images.
        loss: path of a function of the user's.
    """
    return _looked_at(spec, resolution_px, loss)[1]


def _looked_at(
    spec: ModuleFactory, resolution_px: int, loss: str | None
) -> tuple[tuple[str, ...], Look]:
    key = spec.key, resolution_px, loss
    if key not in _LOOKS:
        try:
            _LOOKS[key] = _look_anew(spec, resolution_px, loss)
        except BadValueError as error:
            _LOOKS[key] = (str(error),), Look()
    return _LOOKS[key]


@as_it_was()
def _look_anew(
    spec: ModuleFactory, resolution_px: int, path: str | None
) -> tuple[tuple[str, ...], Look]:
    set_generators(0)
    module = without_weights(spec, resolution_px)
    wrong, look = list[str](), Look()
    attends = (callable(getattr(m, "attend", None)) for m in module.modules())
    if "attend" in spec.seams and not any(attends):
        wrong = [
            f"`model.seams=[attend]`: no module of `{spec.typed}` has an attribute `attend`. Let its "
            "attention modules set `self.attend` to a function of q, k, v and call it, or leave the seam out."
        ]
    if not wrong:
        on_meta = any(p.is_meta for p in module.parameters())
        batch = example_of(spec, 2, resolution_px)
        loss = None
        if path and not [*wrong_function("objective.target", path, "")]:
            loss = partial(_own_loss, spec, path)
        look = look_at(module, batch, loss)
        if look.error and (not on_meta or "meta" in str(look.error).lower()):
            look = look_at(build_module(spec, resolution_px), batch, loss, "cpu")
        wrong += _pass_problems(spec, look, batch, path)
    logits = () if look.outputs is None else _shape(logits_of(look.outputs))
    return tuple(wrong), replace(look, outputs=None, error=None, logits=logits)


def example_of(spec: ModuleFactory, num_images: int, resolution_px: int, seed: int = 0) -> Any:
    """Return a batch such as the model is trained on: zeros and labels 0, or what `model.twin_batch` gives.

    Raises:
        BadValueError: that cannot be imported or called, or gives no such mapping.
    """
    if spec.twin_batch is None:
        images = torch.zeros(num_images, *spec.input_shape(resolution_px))
        return images, torch.zeros(num_images, dtype=torch.int64)
    typed = f"`model.twin_batch={spec.twin_batch}`"
    called = f"with (num_images={num_images}, resolution_px={resolution_px}, seed={seed})"
    try:
        batch = spec.example(num_images, resolution_px, seed)
    except Exception as error:  # the function is the user's
        raise BadValueError(
            f"{typed} raised {type(error).__name__} {called}: {shortened(str(error))}."
        ) from error
    is_mapping = isinstance(batch, Mapping) and bool(batch)
    if not is_mapping or not all(
        isinstance(t, torch.Tensor) and t.shape[:1] == (num_images,) for t in batch.values()
    ):
        raise BadValueError(
            f"{typed} returned {shown(batch)} {called}: return a mapping of tensors whose first axis has "
            "`num_images`."
        )
    return {name: in_float32(tensor) for name, tensor in batch.items()}


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point tensors in float32, and others as they are."""
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def _own_loss(spec: ModuleFactory, path: str, outputs: Any, batch: Any) -> torch.Tensor:
    """Compute `objective.target`; what it raises on `meta` is left as it is."""
    try:
        found = imported_function(path)(outputs, batch)
        is_loss = isinstance(found, torch.Tensor) and not found.shape and found.requires_grad
        fault = "" if is_loss else f"returned {shown(found)}"
    except Exception as error:  # of the user's function, or of an operation that `meta` lacks
        if "meta" in str(error).lower():
            raise
        fault = f"raised {type(error).__name__}: {shortened(str(error))}"
    if fault:
        is_part = spec.output is not None
        of_output = f" (`model.output={spec.output}` of the model's)" * is_part
        raise BadValueError(
            f"`objective.target={path}` {fault} for outputs {shown(outputs)}{of_output} and a batch "
            f"{shown(batch)}, and it must return the mean loss, a tensor of one number that depends on the "
            "outputs."
        )
    return found


_NO_CLASSIFIER = " A model that does not classify needs `objective=module objective.target=...`."


def _pass_problems(spec: ModuleFactory, look: Look, batch: Any, loss: str | None) -> Iterator[str]:
    error, outputs = look.error, look.outputs
    is_mapping = isinstance(batch, Mapping)
    shape = "" if is_mapping else f"images {tuple(batch[0].shape)}"
    given_to = f"entries of {shown(batch)}" if is_mapping else shape
    if isinstance(error, BadValueError):  # of `_Output`, or of the loss
        yield str(error)
    elif error is not None:
        yield (
            f"`{spec.typed}` raised {type(error).__name__} on {given_to} (batch, channels, height, "
            f"width): {shortened(str(error))}. What the module gets of channels, classes and side is in "
            "`model.shape_arguments`: `++model.shape_arguments.img_size=resolution_px` passes the side."
            f"{_NO_CLASSIFIER if loss is None and isinstance(error, TypeError) else ''}"
        )
    elif loss is not None:
        if not differentiable(outputs):
            yield (
                f"`{spec.typed}` returned {_described(outputs)} for {given_to}, in which no tensor has a "
                "gradient: return a tensor, or a tuple or dict of tensors."
            )
    else:
        given = _shape(logits_of(outputs) if is_mapping else outputs)
        if given != (2, spec.num_classes):
            yield (
                f"`{spec.typed}` returned {given} for {given_to}, and logits must be "
                f"(2, {spec.num_classes}), (batch, classes of `data`): see `data.num_classes`, "
                "`model.arguments`, `model.shape_arguments` and `model.output`."
                f"{_NO_CLASSIFIER}"
            )


def _shape(outputs: Any) -> tuple[int, ...] | str:
    return tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else _described(outputs)


def technique_problems(spec: ModuleFactory, cell: "CellSpec") -> Iterator[str]:
    """Yield why techniques of a cell would compute something else of the module, or fail."""
    wrong, look = _looked_at(spec, cell.batch.resolution_px, cell.loss_function)
    if wrong:
        return
    wanted = (2, spec.num_classes)
    if cell.task.epochs and look.logits not in ((), wanted):
        yield (
            f"`task={cell.task.name}` takes the accuracy from logits {wanted}, (batch, "
            f"`data.num_classes`), and `{spec.typed}` returned {look.logits}: return them, or in a "
            "mapping as `logits`."
        )
    yield from look_problems(spec, cell, look)
    proves = cell.measurement.prove == "twin"
    if look.rewritten and proves:
        yield (
            f"`{spec.typed}` writes its own weights in the forward pass, {listed(look.rewritten)}, which the "
            "proof would take for a wrong update: compute them by `torch.nn.utils.parametrize`, or use "
            "`measurement.prove=none`."
        )
    if look.draws and proves:
        side = spec.twin_resolution_px or cell.batch.resolution_px
        twin = look_of(spec.twin(1, spec.num_classes), side, cell.loss_function)
        # dropout without a module fills its mask by `bernoulli_`
        may_be_dropout = bool({"dropout", "bernoulli_"} & {*twin.drawn_by})
        ways = ["turn dropout off in `model.twin_arguments`"] * may_be_dropout
        ways += ["draw them in the items of the data set"] * bool({*twin.drawn_by} - {"dropout"})
        if twin.draws:
            yield (
                f"`{spec.typed}` draws random numbers in training, in {listed(twin.draws)} (by "
                f"{listed(twin.drawn_by)}), and so does its twin, which could not be compared with reference "
                f"training: {', '.join(ways)}, or use `measurement.prove=none`."
            )
    if look.carried and proves and cell.mesh.data_parallel_size > 1:
        yield (
            f"`{spec.typed}` writes the buffers {listed(look.carried)} from its images and reads them in "
            f"later steps: {cell.mesh.data_parallel_size} replicas, each with its own, compute other "
            "results than one. Use one rank, `resources.ranks_per_node=1`, or `measurement.prove=none`."
        )


def look_problems(spec: ModuleFactory, cell: "CellSpec", look: Look) -> Iterator[str]:
    """Yield why techniques of a cell cannot take a module, from what was seen of it."""
    if look.alike:
        yield (
            f"`{spec.typed}` has tensors whose names differ only in `{'`, `'.join(WRAPPERS)}`, which "
            f"wrappers add, {listed(look.alike)}, so that vitsweep would take one for the other: rename one."
        )
    if cell.sharding.shards_parameters:
        if look.unshardable:
            yield (
                f"`sharding={cell.sharding.name}` cannot split parameters without axes or elements, or of "
                f"complex numbers, and `{spec.typed}` has {listed(look.unshardable)}: use `sharding=zero1` "
                "or `ddp`, or give a number one axis and a complex tensor two real parts."
            )
        if look.strided:
            yield (
                f"`sharding={cell.sharding.name}` cannot split parameters that are not contiguous in memory, "
                f"and `{spec.typed}` has {listed(look.strided)}: call `contiguous()` where they are built, "
                "or use `sharding=zero1` or `ddp`."
            )
        for names in look.tied:
            yield (
                f"`sharding={cell.sharding.name}` gathers each block by itself, and `{spec.typed}` has one "
                f"parameter in several, {listed(names)}: use `sharding=zero1` or `ddp`, or untie them."
            )
        if look.uncalled:
            yield (
                f"`sharding={cell.sharding.name}` gathers the parameters of a block when it is called, and "
                f"`{spec.typed}` does not call {listed(look.uncalled)}: name in `model.blocks` modules whose "
                "`forward` is called, or use `sharding=zero1`."
            )
    if look.unused and cell.optimizer.keeps_gradient_views:
        yield (
            f"`optimizer={cell.optimizer.name}` updates all parameters of a buffer alike, and those of "
            f"`{spec.typed}` without a gradient, {listed(look.unused)}, would be updated: freeze them, or "
            f"use `optimizer={cell.optimizer.instead}`."
        )
    plan = cell.precision.plan()
    if look.tied_to_norms and plan.norm_dtype != plan.param_dtype:
        yield (
            f"`precision={cell.precision.name}` keeps norms in {plan.norm_dtype} and all else in "
            f"{plan.param_dtype}, and `{spec.typed}` has one parameter in a norm and outside of norms, "
            f"{listed(look.tied_to_norms)}: use `precision=O1` or `bf16`, or untie them."
        )
    if look.of_complex:
        scale, choice = plan.loss_scale, cell.optimizer
        fused = choice.needs_transformer or getattr(choice, "implementation", None) == "fused"
        for lacks, typed, plain in (
            (scale is not None, f"precision.loss_scale={scale}", "precision.loss_scale=null"),
            (fused, f"optimizer={choice.name}", "optimizer=adamw_foreach"),
        ):
            if lacks:
                yield (
                    f"`{typed}` needs kernels that torch has for real numbers alone, and `{spec.typed}` has "
                    f"the complex parameters {listed(look.of_complex)}: use `{plain}`, or give each two real "
                    "parts."
                )
    if cell.optimizer.needs_transformer and not look.matrices:
        yield (
            f"`optimizer={cell.optimizer.name}` works on matrices of blocks, and `{spec.typed}` has none at "
            f"`model.blocks={spec.blocks}`: name its blocks, or use `optimizer=adamw_fused`."
        )
    for group, is_lost, plain in (
        ("sharding", cell.sharding.shards_parameters or cell.sharding.shards_optimizer, "ddp"),
        ("precision", cell.precision.plan().master_weights, "O1"),
        ("optimizer", cell.optimizer.keeps_gradient_views, "adamw_fused"),
        ("memory", cell.memory.forwards_per_step > 1, "keep_all"),
    ):
        if is_lost and look.rewritten:
            yield (
                f"`{group}={getattr(cell, group).name}` "
                f"{'runs blocks twice' if group == 'memory' else 'updates tensors of its own'}, and the "
                f"forward pass of `{spec.typed}` writes its weights {listed(look.rewritten)}: use "
                f"`{group}={plain}`, or compute these by `torch.nn.utils.parametrize`."
            )
    if look.written and cell.memory.forwards_per_step > 1:
        yield (
            f"`memory={cell.memory.name}` runs each block twice, and its forward pass writes the buffers "
            f"{listed(look.written)} of `{spec.typed}` each time: use `memory=keep_all`."
        )


def without_weights(spec: ModuleFactory, resolution_px: int) -> nn.Module:
    """Build the module on `meta`, or on the host where it cannot be built there.

    Raises:
        BadValueError: it can be built on neither.
    """
    try:
        with torch.device("meta"):
            return build_module(spec, resolution_px)
    except BadValueError as error:
        if isinstance(error.__cause__, OSError):  # no network: the host has none either
            raise
        return build_module(spec, resolution_px)


# FLOPs of a module whose formula nobody wrote, by torch's counter.

IMAGES = 2
"""BatchNorm takes no batch of one value."""


_COUNTED: dict[tuple[str, int], tuple[int, int]] = {}


@as_it_was()
def counted(spec: ModuleFactory, resolution_px: int) -> tuple[int, int]:
    """Return the FLOPs of one image, forward and backward, and the number of parameters.

    One multiply-add is two FLOPs; only matrix products, convolutions and attention count. The passes run on
    `meta`, or on the host where the module fails there.
    """
    key = spec.key, resolution_px
    if key not in _COUNTED:
        set_generators(0)
        module = without_weights(spec, resolution_px)
        try:
            _COUNTED[key] = _count(module, spec, resolution_px)
        except Exception:  # whatever an operation without a meta kernel raises
            _COUNTED[key] = _count(build_module(spec, resolution_px), spec, resolution_px)
    return _COUNTED[key]


def _count(module: nn.Module, spec: ModuleFactory, resolution_px: int) -> tuple[int, int]:
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    example = example_of(spec, IMAGES, resolution_px)
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example)
    counter = FlopCounterMode(display=False)
    with counter:
        sums = [part.sum() for part in differentiable(outputs_of(module, batch))]
        torch.stack(sums).sum().backward()
    return counter.get_total_flops() // IMAGES, sum(p.numel() for p in parameters)
