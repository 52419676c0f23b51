"""What one training pass of a user's module shows; and how it comes back as it was (needs torch)."""

import inspect
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vitsweep.model.block import NORMS, blocks_of
from vitsweep.model.initialize import plain_name
from vitsweep.spec.generators import kept_generators
from vitsweep.world import process_flags_kept

MOST_NAMES, MOST_LETTERS = 10, 400


@dataclass(frozen=True)
class Look:
    """Facts on which techniques depend; empty where the pass could not be run.

    Attributes:
        outputs: what the module returned.
        error: what the pass raised.
        draws: paths of the modules that drew random numbers, or classes of those without a path.
        drawn_by: by what: `dropout`, whatever its class, or functions.
        carried: buffers that the forward pass writes from its inputs, and on which its outputs depend.
        written: buffers that the forward pass wrote inside blocks, running statistics of norms left out.
        rewritten: parameters that the forward pass wrote or replaced.
        unused: trained parameters that got no gradient.
        matrices: weights with two axes in blocks.
        uncalled: blocks whose `forward` was not called.
        tied: names of each parameter that lies in several blocks, or in one and outside of all.
        unshardable: parameters without an axis or a number, or of complex numbers.
        of_complex: trained parameters of complex numbers.
        strided: parameters that are not contiguous.
        tied_to_norms: names of parameters that lie in norms and outside of them.
        alike: names of weights and buffers that differ in the name of a wrapper alone (`plain_name`).
        logits: shape of the logits for two images, or what was returned instead.
    """

    outputs: Any = None
    error: Exception | None = None
    draws: tuple[str, ...] = ()
    drawn_by: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    matrices: int = 0
    uncalled: tuple[str, ...] = ()
    unshardable: tuple[str, ...] = ()
    of_complex: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
    tied_to_norms: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    logits: tuple[int, ...] | str = ()


def inputs_of(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return those entries of a batch that a module's `forward` names; all where it takes any.

    An `image` that it does not name is its first argument, whatever that is called.
    """
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(batch)
    found = {name: value for name, value in batch.items() if name in parameters}
    first = next(iter(parameters), None)
    if "image" in batch.keys() - parameters.keys() and first and first not in batch:
        found[first] = batch["image"]
    return found


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
    number_of = {part: i for i, block in enumerate(blocks_of(module)) for part in block.modules()}
    in_norms: dict[nn.Module, int] = {m: 0 for m in module.modules() if isinstance(m, NORMS)}
    inside = {p for block in blocks_of(module) for p in block.parameters()}
    matrices = sum(p.ndim == 2 for p in inside)
    weights = dict(module.named_parameters())
    plain = Counter(map(plain_name, module.state_dict()))
    still = Look(
        tied=tuple(_ties(module, number_of)),
        tied_to_norms=tuple(name for names in _ties(module, in_norms) for name in names),
        alike=tuple(name for name in module.state_dict() if plain[plain_name(name)] > 1),
        matrices=matrices,
        unshardable=tuple(
            n for n, p in weights.items() if not (p.ndim and p.numel()) or p.is_complex()
        ),
        of_complex=tuple(n for n, p in weights.items() if p.is_complex() and p.requires_grad),
        strided=tuple(n for n, p in weights.items() if not p.is_contiguous()),
    )
    if batch is None:
        return still
    module = module.to(device)
    buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
    stored = {name: (p, p.untyped_storage()) for name, p in module.named_parameters()}
    batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
    drawn = _Drawn(module, batch)
    try:
        before = _host_states()
        with drawn:
            outputs = outputs_of(module, batch)
        now = _host_states()
        hosts = {name: name for name in now if now[name] != before[name]}
        draws = drawn.draws | hosts
        read = drawn.sources(outputs)
        carried = [n for n, b in module.named_buffers() if n in read and INPUTS in drawn.sources(b)]
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
        for name, (parameter, storage) in stored.items()
        if held.get(name) is not parameter or parameter.untyped_storage()._cdata != storage._cdata
    )
    in_place = (n for n, (_, storage) in stored.items() if storage._cdata in drawn.written)
    blocks = set(blocks_of(module))
    uncalled = tuple(n for n, m in module.named_modules() if m in blocks and n not in drawn.called)
    return replace(
        still,
        outputs=outputs,
        draws=tuple(draws),
        drawn_by=tuple(dict.fromkeys(draws.values())),
        carried=tuple(carried),
        written=tuple(_written_in_blocks(module, buffers)),
        rewritten=tuple(dict.fromkeys((*replaced, *in_place))),
        unused=unused,
        uncalled=uncalled,
    )


def _host_states() -> dict[str, object]:
    """Return the states of generators of which torch knows nothing."""
    numbers: Any = np.random.get_state()
    return {"random": random.getstate(), "numpy.random": (*numbers[1], numbers[2:])}


def shapeless(module: nn.Module) -> list[str]:
    """Return the classes of modules whose parameters get a shape with their first batch."""
    parts = (p for p in module.modules() if any(map(is_lazy, p.parameters(recurse=False))))
    return sorted({type(part).__name__ for part in parts})


def outputs_of(module: nn.Module, batch: Any) -> Any:
    """Call a module with images, the first of a pair, or with entries of a mapping."""
    if isinstance(batch, Mapping):
        return module(**inputs_of(module, batch))
    return module(batch[0])


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return names for a sentence; of many the first ten, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


INPUTS = "inputs"
DROPOUTS = ("dropout", "droppath", "dropblock", "stochasticdepth")
"""Parts of the names of classes that draw by a rate, which an argument sets."""


class _Drawn(TorchDispatchMode):
    """Notes which modules run and draw random numbers, what is written, and what depends on what.

    Attributes:
        draws: path of a module -> by what it drew last.
        called: paths of the modules that ran.
        written: storages.
    """

    def __init__(self, module: nn.Module, batch: Any) -> None:
        super().__init__()
        self.draws: dict[str, str] = {}
        self.called: set[str] = set()
        self.written: set[int] = set()
        self._sources: dict[StorageWeakRef, frozenset[str]] = {}
        for name, value in {INPUTS: batch, **dict(module.named_buffers())}.items():
            self._sources |= dict.fromkeys(_storages(value), frozenset({name}))
        self._kinds = {path: type(part).__name__ for path, part in module.named_modules()}
        self._stack: list[str] = []
        self._handles = [
            handle
            for path, part in module.named_modules()
            for handle in (
                part.register_forward_pre_hook(lambda *_, path=path: self._enter(path)),
                part.register_forward_hook(lambda *_: self._leave(), always_call=True),
            )
        ]

    def sources(self, value: Any) -> frozenset[str]:
        """Return on what the tensors of a value depend: `INPUTS`, and buffers as they were before."""
        none = frozenset[str]()
        return none.union(*(self._sources.get(storage, none) for storage in _storages(value)))

    def _enter(self, path: str) -> None:
        self.called.add(path)
        self._stack.append(path)

    def _leave(self) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path, name = self._stack[-1] if self._stack else "", func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name:
            kind = self._kinds[path]
            is_dropout = any(word in kind.lower() for word in DROPOUTS)
            self.draws[path or kind] = "dropout" if is_dropout else name
        # in training a batch norm does not read its running statistics
        read = self.sources(args[:1] if "batch_norm" in name else (args, kwargs))
        results = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
        writes = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        self.written.update(storage.cdata for storage in _storages(writes))
        for storage in _storages((results, writes)):
            self._sources[storage] = self._sources.get(storage, read) | read
        return results

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _storages(value: Any) -> Iterator[StorageWeakRef]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield StorageWeakRef(leaf.untyped_storage())


def logits_of(outputs: Any) -> Any:
    """Return the logits: the outputs themselves, or the entry `logits` of a mapping."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def differentiable(outputs: Any) -> list[Tensor]:
    """Return the tensors in what a module returns that have gradients."""
    parts = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [t for t in tree_leaves(parts) if isinstance(t, Tensor) and t.requires_grad]


def _ties(module: nn.Module, units: Mapping[nn.Module, int]) -> Iterator[tuple[str, ...]]:
    """Yield the names of each parameter that lies in several units, or in one and outside of all."""
    found: dict[nn.Parameter, dict[str, int]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places = found.setdefault(parameter, {})
            places[f"{path}.{name}".lstrip(".")] = units.get(part, -1)
    return (tuple(places) for places in found.values() if len({*places.values()}) > 1)


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
    """Return a text on one line, and of a long one its beginning."""
    return textwrap.shorten(text, MOST_LETTERS, placeholder=" ...")


# What belongs to the user comes back as it was: generators, flags, modes, buffers.


@contextmanager
def as_it_was(module: nn.Module | None = None) -> Iterator[None]:
    """Context after which a module, the default generators and torch's flags are as before.

    Of the module these are the mode of each part (`training`), which parameters need gradients, and the
    buffers. What it keeps elsewhere, as in an attribute that its forward pass counts up, stays as it is then.

    Args:
        module: which the body may switch to evaluation by `eval()`, and call.
    """
    on_gpu = torch.cuda.is_initialized()  # one that nobody has used yet is left alone
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
    with process_flags_kept(), kept_generators(device):
        if module is None:
            yield
            return
        mode, modes = module.training, [(part, part.training) for part in module.modules()]
        trained = [(p, p.requires_grad) for p in module.parameters()]
        held = [(part, dict(part._buffers)) for part, _ in modes if part._buffers]
        written = [b for _, own in held for b in own.values() if b is not None and is_writable(b)]
        copies = [buffer.detach().clone() for buffer in written]
        try:
            yield
        finally:
            module.train(mode)  # a `train` of the user's may undo what its `eval` did
            for part, was in modes:
                part.training = was
            for parameter, was in trained:
                if parameter.requires_grad != was:
                    parameter.requires_grad_(was)
            for part, own in held:
                part._buffers.clear()
                part._buffers.update(own)
            with torch.no_grad():
                for buffer, copy in zip(written, copies, strict=True):
                    buffer.copy_(copy)


def follow(model: nn.Module, other: nn.Module) -> None:
    """Give a model the modes of another, and let the same parameters need gradients, by name."""
    modes = {plain_name(name): part.training for name, part in other.named_modules()}
    for name, part in model.named_modules():
        part.training = modes.get(plain_name(name), part.training)
    needs = {plain_name(name): p.requires_grad for name, p in other.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(needs.get(plain_name(name), parameter.requires_grad))


def is_writable(buffer: Tensor) -> bool:
    """Whether a buffer can be written in place: one that was expanded cannot."""
    places = zip(buffer.stride(), buffer.shape, strict=True)
    return all(step or length <= 1 for step, length in places)


def set_to_train(module: nn.Module) -> None:
    """Call `train()` of a new module; parts that its constructor left in evaluation mode stay in it.

    A module that is in evaluation mode as a whole, as `from_pretrained` returns it, is trained as a whole.
    """
    frozen = [part for part in module.modules() if not part.training]
    is_whole = len(frozen) == len([*module.modules()])
    module.train()
    for part in [] if is_whole else frozen:
        part.training = False
