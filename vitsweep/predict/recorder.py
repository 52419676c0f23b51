"""Record the operators, collectives and live memory of a step that runs on fake tensors (needs torch)."""

import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitsweep.measure.communication import CollectiveReader
from vitsweep.predict.operator_call import operator_call
from vitsweep.predict.step_trace import CollectiveTotal, OperatorTotal, Phase
from vitsweep.spec.resources import AXES
from vitsweep.world import World

Held = Literal["parameters", "gradients", "optimizer", "buffers", "gathered", "activations"]
ALLOCATION_BYTES = {"cpu": 64, "cuda": 512}
"""Sizes are multiples of it: torch's allocators of the two devices."""
READ = torch.ops.aten._local_scalar_dense.default
DEVICE = torch.ops.prim.device.default
PHASE_OF_MARK: dict[str, Phase] = {
    "data": "forward",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""What a step marks as ended -> phase of the operators before it; `bubble` stays in the last phase."""


class Recorder(TorchDispatchMode):
    """Sees every operator of a step on fake tensors.

    Also answers reads of a value by the host, which fake tensors do not have: that no overflow was
    found, and 1 to all else (the step counters of optimizers).

    Args:
        world: this rank's place, for the axes of collectives.
        ranks_per_node: ranks on a node.
        device: whose allocator is counted, `cpu` or `cuda`.
    """

    def __init__(self, world: World, ranks_per_node: int, device: str) -> None:
        super().__init__()
        self._world, self._ranks_per_node = world, ranks_per_node
        self._unit = ALLOCATION_BYTES[device]
        self._read_collective = CollectiveReader()
        self._fake_mode: Any = None
        self._resize = torch.UntypedStorage.resize_
        self._live: dict[int, tuple[int, Held]] = {}
        self._bytes: Counter[Held] = Counter()
        self._elsewhere = False
        self.host_reads = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded, but not what is alive."""
        self._operators: Counter[tuple[Phase, OperatorTotal]] = Counter()
        self._waiting: list[OperatorTotal | tuple[CollectiveTotal, float]] = []
        self._collectives: Counter[tuple[Phase, CollectiveTotal]] = Counter()
        self._sent: defaultdict[tuple[Phase, CollectiveTotal], float] = defaultdict(float)
        self._phase: Phase = "forward"
        self._waiting_dispatches = 0
        self.dispatches: Counter[str] = Counter()
        self._growth: list[Counter[Held]] = [self._bytes.copy()]  # after every allocation
        self._segments: list[tuple[Phase, list[Counter[Held]]]] = []

    # -- marks of the step (`training.trainer.PhaseMarks`) --------------------------------------

    def end(self, mark: str) -> None:
        """Assign what ran since the last mark to the phase that ends."""
        self._phase = PHASE_OF_MARK.get(mark, self._phase)
        for each in self._waiting:
            if isinstance(each, OperatorTotal):
                self._operators[self._phase, each] += 1
            else:
                call, sent = each
                self._collectives[self._phase, call] += 1
                self._sent[self._phase, call] += sent
        self.dispatches[self._phase] += self._waiting_dispatches
        self._segments.append((self._phase, self._growth))
        self._waiting, self._growth, self._waiting_dispatches = [], [self._bytes.copy()], 0

    # -- memory ---------------------------------------------------------------------------------

    def hold(self, tensors: Iterable[Tensor | None], kind: Held) -> None:
        """Count tensors, and say what they are."""
        for tensor in tensors:
            if tensor is not None:
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._hold(local.untyped_storage(), kind)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count no memory inside: it is that of the host."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def _hold(self, storage: Any, kind: Held | None = None) -> None:
        key = id(storage)
        if key not in self._live:
            if self._elsewhere:
                return
            self._live[key] = (0, "activations")
            weakref.finalize(storage, self._freed, key)
        size, before = self._live[key]
        now = -(-storage.nbytes() // self._unit) * self._unit
        self._bytes[before] -= size
        self._live[key] = (now, kind or before)
        self._bytes[kind or before] += now
        if now > size:
            self._growth.append(self._bytes.copy())

    def _freed(self, key: int) -> None:
        size, kind = self._live.pop(key, (0, "activations"))
        self._bytes[kind] -= size

    # -- operators ------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        self._fake_mode = active_fake_mode()
        original, recorder = self._resize, self

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if id(storage) in recorder._live:
                recorder._hold(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # what half of all dispatches come to
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with the local tensors
        inside = active_fake_mode() is self._fake_mode  # not while DTensor works out a sharding
        if func is READ and inside:
            self.host_reads += 1
            return _answer(args[0])
        result = func(*args, **kwargs)
        if inside and func.namespace != "prim":
            self._record(func, result, args, kwargs)
        return result

    def _record(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._read_collective.is_collective(func):
            self._record_collective(func, result, args, kwargs)
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        self._waiting_dispatches += 1
        call = operator_call(func, result, args, kwargs)
        if call:
            self._waiting.append(call)

    def _record_collective(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        call = self._read_collective(func, result, args, kwargs)
        kind = _held_by(call.name, call.purpose) if call else None
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, Tensor) and leaf.numel():
                known = id(leaf.untyped_storage()) in self._live
                self._hold(leaf.untyped_storage(), kind if not known else None)
        if call:
            ranks = dist.get_process_group_ranks(call.group)
            [first, *_] = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            total = CollectiveTotal(
                name=call.name,
                purpose=call.purpose,
                phase="forward",
                axis=self._axis(ranks),
                group_ranks=len(ranks),
                group_nodes=self._nodes(ranks),
                count=0,
                bytes_whole=call.bytes_whole,
                bytes_sent=0.0,
                dtype=str(first.dtype).removeprefix("torch."),
            )
            self._waiting.append((total, call.bytes_sent))

    def _axis(self, ranks: list[int]) -> str:
        """Name the mesh axes along which the ranks of a group differ."""
        if len(ranks) == self._world.size:
            return "world"
        places = [self._world.shape.coordinates(rank) for rank in ranks]
        differing = [
            axis
            for axis, seen in zip(AXES, zip(*places, strict=True), strict=True)
            if len({*seen}) > 1
        ]
        return "+".join(differing) or "alone"

    def _nodes(self, ranks: list[int]) -> int:
        return len({rank // self._ranks_per_node for rank in ranks})

    # -- results --------------------------------------------------------------------------------

    def peaks(self) -> dict[str, dict[str, int]]:
        """Return what was alive at the peak of either half of each phase."""
        of_phase: defaultdict[Phase, list[Counter[Held]]] = defaultdict(list)
        for phase, growth in self._segments:
            of_phase[phase] += growth
        halves = {}
        for phase, growth in of_phase.items():
            middle = -(-len(growth) // 2)
            for half, part in (("start", growth[:middle]), ("end", growth[middle - 1 :])):
                highest = max(part, key=Counter.total)
                halves[f"{phase} {half}"] = {str(kind): size for kind, size in highest.items()}
        return halves

    def operators(self) -> tuple[OperatorTotal, ...]:
        """Return all operators since `clear`, equal calls together."""
        totals: dict[OperatorTotal, list[int]] = {}
        for (phase, call), count in self._operators.items():
            figures = totals.setdefault(_without_figures(phase, call), [0, 0, 0])
            for i, value in enumerate((1, call.flops, call.bytes_moved)):
                figures[i] += value * count
        return tuple(
            replace(total, count=count, flops=flops, bytes_moved=moved)
            for total, (count, flops, moved) in totals.items()
        )

    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """Return all collectives since `clear`, equal calls together."""
        return tuple(
            replace(call, phase=phase, count=count, bytes_sent=self._sent[phase, call])
            for (phase, call), count in self._collectives.items()
        )


def _without_figures(phase: Phase, call: OperatorTotal) -> OperatorTotal:
    kind, shape = call.kind, call.shape
    if kind == "memory":
        shape = shape[:1]
        if phase == "optimizer":
            kind, shape = "optimizer", (*call.shape, 1)[:2]
    return replace(call, kind=kind, phase=phase, shape=shape, count=0, flops=0, bytes_moved=0)


def _held_by(name: str, purpose: str) -> Held:
    if purpose == "parameter" and name == "all_gather":
        return "gathered"
    return "gradients" if purpose == "gradient" else "activations"


def _answer(tensor: Tensor) -> float | int | bool:
    """Return the value that the host would read from a tensor without an overflow, in the first step."""
    overflow = False
    for frame, _ in traceback.walk_stack(None):  # the innermost of both: one calls the other
        if "/optim/" in frame.f_code.co_filename:
            break
        if frame.f_code.co_filename.endswith("grad_scaler.py"):
            overflow = True
            break
    if tensor.dtype is torch.bool:
        return not overflow
    value = 0 if overflow else 1
    return float(value) if tensor.is_floating_point() else value
