"""What one training pass of a user's module shows (needs torch)."""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vitsweep.model.block import blocks_of
from vitsweep.spec.generators import kept_generators

MOST_NAMES = 10
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


@dataclass(frozen=True)
class Look:
    """Facts on which techniques depend; empty where the pass could not be run.

    Attributes:
        outputs: what the module returned.
        error: what the pass raised.
        draws: paths of the modules that drew random numbers, or classes of those without a path.
        written: buffers that the forward pass wrote inside blocks, running statistics of norms left out.
        rewritten: parameters that the forward pass wrote or replaced.
        replaced: those that lie in other memory since.
        unused: trained parameters that got no gradient.
        matrices: weights with two axes in blocks.
        uncalled: blocks whose `forward` was not called.
        overwritten: modules in blocks in which the result of a product was written to afterwards.
        tied: names of each parameter that lies in several places, with the unit of each: the number of
            the block, or -1 outside of all blocks.
        unshardable: parameters without an axis, or of complex numbers.
        logits: shape of the logits for two images, or what was returned in their place.
    """

    outputs: Any = None
    error: Exception | None = None
    draws: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    tied: tuple[tuple[tuple[str, int], ...], ...] = ()
    matrices: int = 0
    uncalled: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    unshardable: tuple[str, ...] = ()
    logits: tuple[int, ...] | str = ()

    def ties_across(self, blocks_per_unit: int) -> Iterator[list[str]]:
        """Yield the names of parameters that several units of sharding would share."""
        for places in self.tied:
            if len({unit // blocks_per_unit for _, unit in places}) > 1:
                yield [name for name, _ in places]


def inputs_of(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of a batch that a module's `forward` names; all where it takes any."""
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(batch)
    return {name: value for name, value in batch.items() if name in parameters}


@kept_generators()
def look_at(
    module: nn.Module,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: str = "meta",
) -> Look:
    """Run a forward and backward pass of a module.

    Args:
        module: is moved to the device and is of no further use.
        batch: images (B, C, H, W) and labels, or a mapping; their values are not read on `meta`. Without
            one the module is not run.
        loss: (outputs, batch) -> loss; without it the sum of the outputs is taken.
        device: where it runs.
    """
    tied = tuple(_ties(module))
    inside = {p for block in blocks_of(module) for p in block.parameters()}
    matrices = sum(p.ndim == 2 for p in inside)
    unshardable = tuple(n for n, p in module.named_parameters() if not p.ndim or p.is_complex())
    still = Look(tied=tied, matrices=matrices, unshardable=unshardable)
    if batch is None:
        return still
    module = module.to(device)
    buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    weights = {name: (p, p.untyped_storage()) for name, p in module.named_parameters()}
    drawn = _Drawn(module)
    batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
    try:
        before = _host_states()
        with drawn:
            outputs = outputs_of(module, batch)
        now = _host_states()
        draws = (*drawn.paths, *(name for name in now if now[name] != before[name]))
        trained = [loss(outputs, batch)] if loss else [p.sum() for p in differentiable(outputs)]
        if trained:
            torch.stack(trained).sum().backward()
    except Exception as error:  # of the user's module, or of an operation that `meta` lacks
        return replace(still, error=error)
    finally:
        drawn.remove()
    named = module.named_parameters() if trained else ()
    unused = tuple(name for name, p in named if p.requires_grad and p.grad is None)
    held = dict(module.named_parameters())
    replaced = tuple(
        name
        for name, (parameter, storage) in weights.items()
        if held.get(name) is not parameter or parameter.untyped_storage()._cdata != storage._cdata
    )
    in_place = (n for n, (_, storage) in weights.items() if storage._cdata in drawn.written)
    blocks = set(blocks_of(module))
    uncalled = tuple(n for n, m in module.named_modules() if m in blocks and n not in drawn.called)
    overwritten = tuple(
        dict.fromkeys(path for path, t, version in drawn.products if t._version != version)
    )
    return replace(
        still,
        outputs=outputs,
        draws=draws,
        written=tuple(_written_in_blocks(module, buffers)),
        rewritten=tuple(dict.fromkeys((*replaced, *in_place))),
        replaced=replaced,
        unused=unused,
        uncalled=uncalled,
        overwritten=overwritten,
    )


def _host_states() -> dict[str, object]:
    """Return the states of generators of which torch knows nothing."""
    numbers: Any = np.random.get_state()
    return {"Python's `random`": random.getstate(), "`numpy.random`": (*numbers[1], numbers[2:])}


def shapeless(module: nn.Module) -> list[str]:
    """Return the classes of modules whose parameters get a shape with their first batch."""
    return list(
        dict.fromkeys(
            type(part).__name__
            for part in module.modules()
            if any(is_lazy(p) for p in part.parameters(recurse=False))
        )
    )


def outputs_of(module: nn.Module, batch: Any) -> Any:
    """Call a module with images, the first of a pair, or with entries of a mapping."""
    if isinstance(batch, Mapping):
        return module(**inputs_of(module, batch))
    return module(batch[0])


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return names for a sentence; of many the first ten, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


class _Drawn(TorchDispatchMode):
    """Notes which modules run and draw random numbers, what is written, and what products blocks compute."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.paths: dict[str, None] = {}
        self.called: set[str] = set()
        self.products: list[tuple[str, Tensor, int]] = []
        self.written: set[int] = set()  # storages
        inside = {part for block in blocks_of(module) for part in block.modules()}
        self._inside = {path for path, part in module.named_modules() if part in inside}
        self._outermost = type(module).__name__
        self._stack: list[str] = []
        self._handles = [
            handle
            for path, part in module.named_modules()
            for handle in (
                part.register_forward_pre_hook(lambda *_, path=path: self._enter(path)),
                part.register_forward_hook(lambda *_: self._leave(), always_call=True),
            )
        ]

    def _enter(self, path: str) -> None:
        self.called.add(path)
        self._stack.append(path)

    def _leave(self) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path = self._stack[-1] if self._stack else ""
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func):
            self.paths[path or self._outermost] = None
        results = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
            writes = [
                given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write
            ]
            held = (t.untyped_storage() for t in tree_leaves(writes) if isinstance(t, Tensor))
            self.written.update(storage._cdata for storage in held)
        if path in self._inside and func.overloadpacket.__name__ in PRODUCTS:
            self.products.append((path, results, results._version))
        return results

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def logits_of(outputs: Any) -> Any:
    """Return the logits: the outputs themselves, or the entry `logits` of a mapping."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def differentiable(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module returns that have gradients."""
    if isinstance(outputs, Tensor):
        if outputs.requires_grad:
            yield outputs
    elif isinstance(outputs, dict):
        for part in outputs.values():
            yield from differentiable(part)
    elif isinstance(outputs, (tuple, list)):
        for part in outputs:
            yield from differentiable(part)


def _ties(module: nn.Module) -> Iterator[tuple[tuple[str, int], ...]]:
    units = {
        part: number for number, block in enumerate(blocks_of(module)) for part in block.modules()
    }
    found: dict[nn.Parameter, dict[str, int]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places = found.setdefault(parameter, {})
            places[f"{path}.{name}".lstrip(".")] = units.get(part, -1)
    return (tuple(places.items()) for places in found.values() if len(places) > 1)


def _written_in_blocks(module: nn.Module, before: dict[str, tuple[Tensor, int]]) -> Iterator[str]:
    inside = {part for block in blocks_of(module) for part in block.modules()}
    for path, part in module.named_modules():
        if part not in inside or isinstance(part, _NormBase):
            continue
        for name, buffer in part.named_buffers(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            old = before.get(full)
            if old is None or old[0] is not buffer or old[1] != buffer._version:
                yield full


def shown(batch: Any) -> str:
    """Return types and shapes of a batch or an item, for a sentence."""
    if isinstance(batch, torch.Tensor):
        return f"a tensor {tuple(batch.shape)} of {batch.dtype}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {shown(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return f"({', '.join(map(shown, batch))})"
    return f"{type(batch).__name__} {batch!r:.60}"


def shortened(text: str) -> str:
    """Return a text on one line; of a list in it the first ten names, and how many more there are."""
    text = " ".join(text.split())
    parts = text.split(", ")
    if len(parts) <= 2 * MOST_NAMES:  # a sentence or two
        return text
    return f"{', '.join(parts[:MOST_NAMES])} and {len(parts) - MOST_NAMES} more"
