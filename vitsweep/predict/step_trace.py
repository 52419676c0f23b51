"""StepTrace: the operators, collectives and memory of one training step on one rank (no torch)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

Phase = Literal["forward", "backward", "optimizer"]
OperatorKind = Literal["matmul", "convolution", "attention", "memory", "optimizer"]


BY_WEIGHT = "mm.t"
"""A product whose left side is transposed: the gradient of a weight, gradient.t() @ input. Its rate may be
ten times that of the gradient of the input, where a CPU emulates the format."""


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
        purpose: `parameter`, `gradient` or `activation`, as in the columns of measured bytes.
        phase: of the step.
        axis: mesh axes that the group spans, joined by `+`, such as `shard`; `world` for all ranks.
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
    axis: str
    group_ranks: int
    group_nodes: int
    count: int
    bytes_whole: int
    bytes_sent: float
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank.

    Attributes:
        parameters: held between steps; shards where they are sharded.
        gradients: held before the update.
        optimizer: moments, and float32 copies of parameters in lower precision.
        activations: alive at the peak of forward and backward beside all others.
        gathered: parameters gathered from the shards of all ranks, alive at that peak.
        buffers: held for the whole run beside these: buckets of DDP.
        peak: largest sum of all that is alive at one moment of the step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    buffers: int
    peak: int


def memory_parts(peaks: Mapping[str, Mapping[str, int]], **held: int) -> MemoryParts:
    """Find the peak, and what makes up that of forward and backward.

    Args:
        peaks: as in `StepTrace`.
        held: parameters, gradients, optimizer, buffers.
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
        images_per_step: of all ranks together.
        ranks: number of all ranks.
        device: `cpu` or `cuda`, the device type for which the cell was resolved.
        pipeline_ranks: number of pipeline stages that wait for one another, 1 without a pipeline.
        pipeline_chunks: micro-batches that pass through a pipeline in one step, times the stages of
            one rank; its bubble is (pipeline_ranks - 1) / pipeline_chunks of the computing time.
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
    images_per_step: int
    ranks: int
    device: str
    pipeline_ranks: int = 1
    pipeline_chunks: int = 1
    compiled: str = "nothing"
    notes: tuple[str, ...] = ()
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank sends in one step."""
        return sum(total.bytes_sent for total in self.collectives)

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
