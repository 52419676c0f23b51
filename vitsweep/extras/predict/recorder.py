"""Record the operators, collectives and live memory of a step that runs on fake tensors (needs torch)."""

import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitsweep.extras.predict.step_time import (
    BY_WEIGHT,
    CollectiveTotal,
    OperatorKind,
    OperatorTotal,
    Phase,
)
from vitsweep.measure.communication import CollectiveReader

aten = torch.ops.aten

NO_KERNEL = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.alias,
    aten.detach,
    aten.detach_,
    aten._local_scalar_dense,
    aten.set_,
    aten.resize_,
}
"""Operators that read and write no elements."""

ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}
WRITE_ONLY = ("copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_")
"""Operators in place that do not read what they overwrite."""


def operator_call(
    func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperatorTotal | None:
    """Describe one call; its phase is not known here, and what is `optimizer` later is `memory`.

    Args:
        func: overload of the operator.
        result: what it returned.
        args: as dispatched.
        kwargs: as dispatched.

    Returns:
        None for views and for what reads and writes no elements.
    """
    packet = func._overloadpacket
    if func.is_view or packet in NO_KERNEL:
        return None
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    if not tensors and not isinstance(result, Tensor):
        return None
    first = tensors[0] if tensors else result
    kind, shape = _kind_and_shape(packet, args, tensors or [result])
    return OperatorTotal(
        kind=kind,
        phase="forward",
        count=1,
        name=BY_WEIGHT
        if _is_by_weight(packet, args)
        else packet._qualified_op_name.split("::")[-1],
        dtype=str(first.dtype).removeprefix("torch."),
        shape=shape,
        flops=_flops(packet, kind, shape, args, kwargs | {"out_val": result}),
        bytes_moved=_bytes_moved(func, result, args, kwargs),
    )


def _is_by_weight(packet: Any, args: tuple[Any, ...]) -> bool:
    return packet is aten.mm and args[0].t().is_contiguous() and not args[0].is_contiguous()


def _kind_and_shape(
    packet: Any, args: tuple[Any, ...], tensors: list[Tensor]
) -> tuple[OperatorKind, tuple[int, ...]]:
    if packet in (aten.mm, aten.bmm, aten._scaled_mm):
        return "matmul", _product(args[0], args[1])
    if packet in (aten.addmm, aten.baddbmm):
        return "matmul", _product(args[1], args[2])
    if packet is aten.convolution:
        return "convolution", _convolution(args[0], args[1], args[3], args[4], args[8])
    if packet is aten.convolution_backward:
        return "convolution", _convolution(args[1], args[2], args[4], args[5], args[9])
    if packet in ATTENTION:
        return "attention", _attention(args[0], args[1])
    if packet in ATTENTION_BACKWARD:
        return "attention", _attention(args[1], args[2])
    lists = [a for a in args if isinstance(a, (list, tuple)) and _is_tensors(a)]
    if lists:
        return "memory", (sum(t.numel() for t in lists[0]), len(lists[0]))
    return "memory", (max(t.numel() for t in tensors),)


def _product(left: Tensor, right: Tensor) -> tuple[int, ...]:
    """(batch, m, n, k) of (m, k) x (k, n), or of a batch of these."""
    return prod(left.shape[:-2]), left.shape[-2], right.shape[-1], left.shape[-1]


def _convolution(
    inputs: Tensor, weight: Tensor, stride: list[int], padding: list[int], groups: int
) -> tuple[int, ...]:
    """(groups, m, n, k) of the product that a convolution is, dilation left out."""
    sides = [
        (size + 2 * pad - kernel) // step + 1
        for size, pad, kernel, step in zip(
            inputs.shape[2:], padding, weight.shape[2:], stride, strict=True
        )
    ]
    return groups, inputs.shape[0] * prod(sides), weight.shape[0] // groups, prod(weight.shape[1:])


def _attention(q_BHTK: Tensor, k_BHSK: Tensor) -> tuple[int, ...]:
    batch, heads, queries, width = q_BHTK.shape
    return batch, heads, queries, k_BHSK.shape[2], width


def _bytes_moved(func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes read and written: arguments, and results or the arguments that are changed in place."""
    reads, writes = 0, 0
    name = func._overloadpacket.__name__
    values = [*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :])]
    for argument, value in zip(func._schema.arguments, values, strict=False):
        size = sum(_held(t) for t in _tensors([value]))
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and name.startswith("_fused_") and argument.name == "grads":
            written = False  # changed by a loss scale alone
        writes += size * written
        reads += size * (not (written and (name in WRITE_ONLY or argument.kwarg_only)))
    if not writes:
        writes = sum(_held(t) for t in _tensors([result]))
    return reads + writes


def _held(tensor: Tensor) -> int:
    """Bytes of a tensor; of an expanded one those that exist."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


def _is_tensors(values: Any) -> bool:
    return bool(values) and all(isinstance(value, Tensor) for value in values)


def _flops(packet: Any, kind: OperatorKind, shape: tuple[int, ...], args: Any, rest: Any) -> int:
    """FLOPs of one call, one multiply-add = 2.

    By torch's formulas, but for what they get wrong or leave out (2.11 to 2.13): gradients of
    filters in groups, flash attention on CPU, masked pairs, which flash attention skips.
    """
    if kind == "convolution":
        gradients = args[10] if packet is aten.convolution_backward else (True, False, False)
        return 2 * prod(shape) * sum(gradients[:2])
    if kind == "attention":
        batch, heads, queries, keys, width = shape
        backward = (
            packet in ATTENTION_BACKWARD
        )  # with q k^T once more, five products instead of two
        whole = batch * heads * queries * keys * 2 * width * (5 if backward else 2)
        return whole * (keys + 1) // (2 * keys) if _is_causal(args, backward) else whole
    counted = flop_counter.flop_registry.get(packet)
    return int(counted(*args, **rest)) if counted else 0


def _is_causal(args: tuple[Any, ...], backward: bool) -> bool:
    """Whether flash attention (for CPU) has a causal mask."""
    at = 7 if backward else 4
    return len(args) > at and args[at] is True


# Seeing them: every operator of a step on fake tensors, with its tensors in memory.


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
        ranks_per_node: ranks on a node.
        device: whose allocator is counted, `cpu` or `cuda`.
    """

    def __init__(self, ranks_per_node: int, device: str) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node
        self._unit = ALLOCATION_BYTES[device]
        self._read_collective = CollectiveReader()
        self._fake_mode: Any = None
        self._resize = torch.UntypedStorage.resize_
        self._live: dict[int, tuple[int, Held]] = {}
        self._bytes: Counter[Held] = Counter()
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

    def _hold(self, storage: Any, kind: Held | None = None) -> None:
        key = id(storage)
        if key not in self._live:
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
                group_ranks=len(ranks),
                group_nodes=self._nodes(ranks),
                count=0,
                bytes_whole=call.bytes_whole,
                bytes_sent=0.0,
                dtype=str(first.dtype).removeprefix("torch."),
            )
            self._waiting.append((total, call.bytes_sent))

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
