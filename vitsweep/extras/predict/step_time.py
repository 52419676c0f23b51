"""The time of a training step from its trace and the rates of a device, with an interval.

Each phase lasts as long as the larger of device time and dispatch time on a GPU, and their sum on a
CPU. Gathering of parameters and exchange of gradients overlap with computing, all but the first (last)
message; exchange of activations does not. A pipeline adds its bubble.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter

from vitsweep.planning.closed_memory import MemoryParts
from vitsweep.spec.model_parallel import BYTES
from vitsweep.tables.stats import half_width

Phase = Literal["forward", "backward", "optimizer"]
OperatorKind = Literal["matmul", "convolution", "attention", "memory", "optimizer"]
BY_WEIGHT = "mm.t"
"""A product whose left side is transposed: the gradient of a weight, gradient.t() @ input. Its rate may be
ten times that of the gradient of the input, where a CPU emulates the format."""
FRESH = "fresh memory"
"""Name of what stands among timed operators for memory that the system provides when it is written first."""
Shapes = Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]
"""dtype -> (name, shape) of products (`addmm`, `mm`, `mm.t`, `bmm`) and of `attention`, shapes as in
`OperatorTotal`."""
Exchanges = Sequence[tuple[str, str, int]]
"""(name, dtype, bytes of the whole tensor) of collectives."""


@dataclass(frozen=True, kw_only=True)
class OperatorTotal:
    """All calls of one operator with equal shapes in one phase of a step.

    Attributes:
        kind: `matmul`; `convolution`; `attention` (fused kernels); `optimizer` (all else in the phase
            of this name); `memory` (all else: element-wise operators, norms, reductions and copies,
            bound by memory bandwidth).
        name: of the PyTorch operator, such as `addmm`.
        phase: of the step; recomputation counts as backward.
        dtype: of the inputs, such as `bfloat16`.
        shape: of `matmul` and `convolution` (batch, m, n, k), a convolution as the product that
            computes it (m output pixels of all images, n output channels, k inputs of one of them);
            of `attention` (batch, heads, queries, keys, head_width); of `memory` (elements,) of the
            largest tensor of one call; of `optimizer` (elements, tensors) of the list of tensors, or
            the one tensor, that one call works on.
        count: calls in one step.
        flops: of all calls, one multiply-add = 2; 0 where PyTorch counts none (`memory`, `optimizer`).
        bytes_moved: bytes of all inputs and outputs of all calls.
    """

    kind: OperatorKind
    name: str
    phase: Phase
    dtype: str
    shape: tuple[int, ...]
    count: int
    flops: int
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class CollectiveTotal:
    """All calls of one collective over one group of ranks, with equal sizes, in one phase of a step.

    Attributes:
        name: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`.
        purpose: `parameter`, `gradient`, `optimizer` or `activation`, as in the columns of measured bytes.
        phase: of the step.
        group_ranks: number of ranks in the group.
        group_nodes: number of nodes on which these lie.
        count: calls in one step.
        bytes_whole: bytes of the whole tensor of one call: gathered, or before it is scattered; a
            message for `send`.
        bytes_sent: bytes that this rank sends in all calls (`measure.communication` counts the same).
        dtype: of the tensor; gloo sums bfloat16 as slowly per element as float32.
    """

    name: str
    purpose: str
    phase: Phase
    group_ranks: int
    group_nodes: int
    count: int
    bytes_whole: int
    bytes_sent: float
    dtype: str = "float32"


def memory_parts(peaks: Mapping[str, Mapping[str, int]], **held: int) -> MemoryParts:
    """Return the peak memory of a step, and the parts of the peak of forward and backward, in bytes.

    Args:
        peaks: as in `StepTrace`.
        held: bytes of parameters, gradients, optimizer, buffers.
    """
    training = [alive for half, alive in peaks.items() if not half.startswith("optimizer")]
    highest = max(training, key=lambda alive: sum(alive.values()))
    return MemoryParts(
        **held,
        activations=highest.get("activations", 0),
        gathered=highest.get("gathered", 0),
        peak=max(sum(alive.values()) for alive in peaks.values()),
    )


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What one rank does in one training step.

    Attributes:
        operators: of this rank.
        collectives: of this rank.
        memory: of this rank.
        dispatches: phase -> operators that the host dispatches, views included.
        parameters: number of parameters of the whole model.
        flops_per_step: of this rank, recomputation included: the sum over `operators`.
        device: `cpu` or `cuda`, the device type for which the cell was resolved.
        pipeline_ranks: number of pipeline stages that wait for one another, 1 without a pipeline.
        pipeline_chunks: micro-batches that pass through a pipeline in one step; its bubble is
            (pipeline_ranks - 1) / pipeline_chunks of the computing time.
        compiled: what is compiled: `nothing`, `block` or `model`. The operators are those of the
            eager step.
        notes: what was left out or approximated, as full sentences.
        peaks: half of a phase (`backward end`) -> kind of tensor -> bytes alive when their sum was
            largest in it.
    """

    operators: tuple[OperatorTotal, ...]
    collectives: tuple[CollectiveTotal, ...]
    memory: MemoryParts
    dispatches: dict[str, int]
    parameters: int
    flops_per_step: int
    device: str
    pipeline_ranks: int = 1
    pipeline_chunks: int = 1
    compiled: str = "nothing"
    notes: tuple[str, ...] = ()
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a tree of dictionaries, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "StepTrace":
        """Read what `to_json` returned.

        Raises:
            ValueError: a field is missing or has a wrong value.
        """
        return _adapter().validate_python(tree)


@cache
def _adapter() -> TypeAdapter[StepTrace]:
    return TypeAdapter(StepTrace)


# The time of a step from its trace and the rates of a device.


# Rates: how long one operator and one collective take on a device.


class Rates(ABC):
    """Times of operators and collectives on one device.

    Attributes:
        asynchronous: whether the host only queues operators (GPU), so that dispatching one and
            computing another happen at once. On a CPU the times add up, and communication takes
            cores from computing.
        title: of which device these are, and where they come from.
        dispatch_us: host time of one dispatched operator in microseconds, besides what it computes.
        update_dispatch: the same of an operator of the optimizer, over that of the others.
        step_overhead: whole steps over the sum of their parts.
        compiled_memory: bytes that element-wise kernels move when a compiler fuses them, relative to eager.
        degrees: of freedom behind `log_error`: few make intervals wider.
    """

    asynchronous: ClassVar[bool]
    title: str
    dispatch_us: float
    update_dispatch: float = 1.0
    step_overhead: float = 1.0
    compiled_memory: float = 1.0
    degrees: float = math.inf

    def fresh_us(self, size: float) -> float:
        """Microseconds in which the system provides so many bytes of memory."""
        return 0.0

    @abstractmethod
    def operator_us(self, operator: OperatorTotal, tf32: bool = False) -> float:
        """Microseconds of one call.

        Args:
            operator: its kind, shape and bytes.
            tf32: whether float32 products may use TensorFloat-32.
        """

    @abstractmethod
    def collective_us(self, collective: CollectiveTotal) -> float:
        """Microseconds of one call, with nothing else running."""

    @abstractmethod
    def log_error(self, part: str, number_format: str = "") -> float:
        """Standard deviation of log(measured / predicted) of a part of the step.

        Args:
            part: `compute`, `optimizer`, `communication`, `launch`, `bubble`, `data` or `step` (what all
                parts have in common).
            number_format: in which most FLOPs of the step are computed, such as `tf32`.
        """

    @abstractmethod
    def compiled_dispatch(self) -> float:
        """Host time of a compiled step relative to eager."""

    def overlap_charge(self, collective: CollectiveTotal) -> float:
        """Share by which computing slows down while this collective overlaps with it."""
        return 0.0

    def notes(self, formats: set[str]) -> tuple[str, ...]:
        """Full sentences on what is not known of this device, for the number formats of a step."""
        return ()


def student_80(degrees: float) -> float:
    """Return half the width of an interval of 80 % in standard deviations that are known so well."""
    return float(half_width(1.0, min(degrees, 1e9), 0.2))


PARTS = ("compute", "communication", "optimizer", "launch", "bubble", "data")


@dataclass(frozen=True, kw_only=True)
class StepTimePrediction:
    """The predicted time of one step on the slowest rank.

    Attributes:
        step_time_ms: median of what is expected.
        low_ms: lower end of the interval that is meant to hold 80 % of measurements.
        high_ms: its upper end.
        parts_ms: part (see `PARTS`) -> milliseconds; they sum up to `step_time_ms`.
            `communication` is what computing does not hide; `launch` is host time beyond it.
        regime: what the step mostly waits for: `compute`, `communication`, `launch`, `optimizer`,
            `bubble` or `data`.
        rates: of which device the rates are, and where they come from.
        notes: what is uncertain, as full sentences.
    """

    step_time_ms: float
    low_ms: float
    high_ms: float
    parts_ms: dict[str, float]
    regime: str
    rates: str
    notes: tuple[str, ...] = ()


def predict_step(
    trace: StepTrace,
    rates: Rates,
    *,
    tf32: bool = False,
    input_ms: float = 0.0,
) -> StepTimePrediction:
    """Predict the time of one step.

    Args:
        trace: what a rank does.
        rates: of its device.
        tf32: whether float32 products may use TensorFloat-32.
        input_ms: time in which the loader prepares one step's images; what the step does not hide counts.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for phase in ("forward", "backward", "optimizer"):
        _add_phase(parts, trace, rates, phase, tf32)
    parts["compute"] += rates.fresh_us(fresh_bytes(trace)) / 1e3
    if trace.pipeline_ranks > 1:
        busy = parts["compute"] + parts["launch"]
        parts["bubble"] = busy * (trace.pipeline_ranks - 1) / trace.pipeline_chunks
    parts = {part: value * rates.step_overhead for part, value in parts.items()}
    computed = sum(parts.values())
    parts["data"] = max(0.0, input_ms - computed)
    total = sum(parts.values())
    flops: Counter[str] = Counter()
    for operator in trace.operators:
        is_tf32 = tf32 and operator.dtype == "float32"
        flops["tf32" if is_tf32 else operator.dtype] += operator.flops
    formats = [name for name, number in flops.most_common() if number]
    half = _log_error(parts, rates, *formats[:1]) * student_80(rates.degrees)
    return StepTimePrediction(
        step_time_ms=total,
        low_ms=total * math.exp(-half),
        high_ms=total * math.exp(half),
        parts_ms=parts,
        regime=max(parts, key=lambda part: parts[part]),
        rates=rates.title,
        notes=(*trace.notes, *rates.notes({*formats})),
    )


FRESH_SHARE = 0.5
KEPT_TENSORS = 2
"""The C library keeps freed memory of up to twice the largest tensor. Of what is freed beyond that it gives
back what lies above all that is in use: none to all of it in 30 trainings, half of it in the middle."""


def fresh_bytes(trace: StepTrace) -> float:
    """Return the bytes that a step on a CPU writes in memory that the system has to provide anew.

    What forward, backward and the optimizer need besides what is held between steps is freed in each step.
    """
    if trace.device != "cpu":
        return 0.0
    largest = max((_largest(operator) for operator in trace.operators), default=0)
    needed: dict[bool, int] = {}
    for half, alive in trace.peaks.items():
        update, moved = half.startswith("optimizer"), ("activations", "gathered")
        needed[update] = max(needed.get(update, 0), sum(alive.get(kind, 0) for kind in moved))
    return FRESH_SHARE * sum(max(0, most - KEPT_TENSORS * largest) for most in needed.values())


def _largest(operator: OperatorTotal) -> int:
    """Return the bytes of the largest tensor of an operator, of products that of their result."""
    size = BYTES.get(operator.dtype, 4)
    if operator.kind in ("matmul", "convolution"):
        return size * math.prod(operator.shape[:3])
    if operator.kind == "attention" or operator.shape[1:] > (1,):
        return 0  # lists of tensors
    return size * operator.shape[0]


def _add_phase(
    parts: dict[str, float],
    trace: StepTrace,
    rates: Rates,
    phase: str,
    tf32: bool,
) -> None:
    compiled = trace.compiled != "nothing" and phase != "optimizer"
    device_us = 0.0
    for operator in trace.operators:
        if operator.phase != phase:
            continue
        fused = rates.compiled_memory if compiled and operator.kind == "memory" else 1.0
        device_us += fused * operator.count * rates.operator_us(operator, tf32)
    host_us = trace.dispatches.get(phase, 0) * rates.dispatch_us
    host_us *= rates.update_dispatch if phase == "optimizer" else 1.0
    if compiled:
        host_us *= rates.compiled_dispatch()
    collectives = [c for c in trace.collectives if c.phase == phase]
    exposed_us, charge_us = _exposed(collectives, device_us, rates)
    device_us += charge_us
    launch_us = max(0.0, host_us - device_us - exposed_us) if rates.asynchronous else host_us
    parts["optimizer" if phase == "optimizer" else "compute"] += device_us / 1e3
    parts["communication"] += exposed_us / 1e3
    parts["launch"] += launch_us / 1e3


def _exposed(
    collectives: Sequence[CollectiveTotal], computing_us: float, rates: Rates
) -> tuple[float, float]:
    """Return the communication that computing does not hide, and by what computing is slowed down."""
    exposed = hidden_at_most = charge = messages = 0.0
    for collective in collectives:
        time = collective.count * rates.collective_us(collective)
        if collective.purpose in ("activation", "optimizer") or not rates.asynchronous:
            exposed += time  # waited for; on a CPU the exchange takes the cores that compute
            continue
        hidden_at_most += time
        charge += time * rates.overlap_charge(collective)
        messages += collective.count
    if not hidden_at_most:
        return exposed, 0.0
    first = hidden_at_most / max(
        1.0, messages
    )  # nothing computes yet (or any more) besides one message
    rest = hidden_at_most - first
    room = computing_us * (1 - 1 / (messages + 1))
    hidden = min(rest, room)
    return exposed + first + rest - hidden, charge * hidden / hidden_at_most


def _log_error(parts: dict[str, float], rates: Rates, number_format: str = "") -> float:
    """Combine errors of the parts, taken as independent, and the one that all share."""
    total = sum(parts.values()) or 1.0
    errors = {part: rates.log_error(part, number_format) for part in parts}
    own = sum((value / total * errors[part]) ** 2 for part, value in parts.items())
    return math.sqrt(own + rates.log_error("step") ** 2)
