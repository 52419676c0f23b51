"""The trace of a training step by closed formulas, for transformers of equal blocks.

It takes microseconds, and serves models of which no code is here. Letters: b images of a
micro-batch, T tokens of a rank in it, D width, M width of the MLP; t tensor, s sequence, p pipeline degree.
"""

from collections.abc import Iterator
from math import ceil, prod

from vitsweep.extras.predict.step_time import (
    BY_WEIGHT,
    CollectiveTotal,
    OperatorTotal,
    Phase,
    StepTrace,
)
from vitsweep.planning.closed_memory import Sizes, memory
from vitsweep.spec.resources import AXES

BUCKET_BYTES = 25 * 2**20
"""DDP's bucket."""
DISPATCHES = {"forward": 45, "backward": 100}
SHARDED_DISPATCHES = {"forward": 29, "backward": 38}
SEQUENCE_DISPATCHES = {"forward": 20, "backward": 23}
RECOMPUTED_DISPATCHES = 65
"""Operators that the host dispatches per block, views included, and how many more where parameters are
gathered, tokens exchanged or blocks computed again: counted in traces of ViTs."""
UPDATE = {"fused": (28, 6), "foreach": (76, 14), "loop": (76, 14)}
"""AdamW -> (bytes moved per float32 parameter, dispatches per step, or per tensor in a loop). Fused reads
parameter, gradient and moments and writes all but the gradient; the others pass over memory per operator."""
TENSORS_PER_BLOCK = 12


STATE_AXES = ("shard", "sequence", "ring", "ulysses")
GRADIENT_AXES = ("replicate", *STATE_AXES)
SEQUENCE_AXES = ("sequence", "ring", "ulysses")


def closed_trace(s: Sizes) -> StepTrace:
    """Return the step of the rank with most to do."""
    mesh = s.mesh
    operators = tuple(_operators(s))
    collectives = tuple(_collectives(s))
    blocks = s.rank_blocks
    passes = s.micro_batches * blocks
    forward, backward = (
        DISPATCHES[phase]
        + s.sharded * SHARDED_DISPATCHES[phase]
        + (mesh.sequence_parallel_size > 1) * SEQUENCE_DISPATCHES[phase]
        for phase in ("forward", "backward")
    )
    backward += RECOMPUTED_DISPATCHES * (s.recompute != "none")
    tensors = TENSORS_PER_BLOCK * blocks + 6
    _, per_update = UPDATE[s.update]
    return StepTrace(
        operators=operators,
        collectives=collectives,
        memory=memory(s),
        dispatches={
            "forward": forward * passes,
            "backward": backward * passes,
            "optimizer": per_update * (tensors if s.update == "loop" else 2),
        },
        parameters=s.parameters,
        flops_per_step=sum(operator.flops for operator in operators),
        device="cuda",
        pipeline_ranks=mesh.pipeline,
        pipeline_chunks=s.micro_batches,
    )


def _operators(s: Sizes) -> Iterator[OperatorTotal]:
    mesh, b = s.mesh, s.micro_batch
    tokens, d, m, t = s.rank_tokens, s.width, s.mlp_width, mesh.tensor
    count = s.rank_blocks * s.micro_batches
    linears = [
        (tokens, 3 * d // t, d),
        (tokens, d, d // t),
        (tokens, m // t, d),
        (tokens, d, m // t),
    ]
    for shape in linears:
        yield from _linear(*shape, count, s)
    if s.recompute == "blocks":
        for shape in linears[:-1]:  # the result of the last product is not needed again
            yield _product("addmm", "backward", (1, *shape), count, s)
    yield from _attention(s, count)
    for place, (rows, outputs, inputs) in enumerate(s.edge_products):
        products = list(_linear(b * rows, outputs, inputs, s.micro_batches, s))
        yield from products if place else (products[0], products[2])  # images need no gradient
    again = 1 if s.recompute != "none" else 0
    stream, i = s.stream, s.inner
    moved: tuple[tuple[str, Phase, float, int], ...] = (
        ("native_layer_norm", "forward", tokens * d * (stream + i), 2),
        ("gelu", "forward", tokens * m / t * 2 * i, 1),
        ("add", "forward", tokens * d * (2 * stream + i), 2),
        ("native_layer_norm", "backward", tokens * d * (stream + i), 2 * again),
        ("gelu", "backward", tokens * m / t * 2 * i, again),
        ("add", "backward", tokens * d * (2 * stream + i), again * (s.recompute == "blocks")),
        ("native_layer_norm_backward", "backward", tokens * d * (2 * stream + i), 2),
        ("gelu_backward", "backward", tokens * m / t * 3 * i, 1),
        ("add", "backward", tokens * d * 3 * stream, 2),
        ("sum", "backward", tokens * (2 * d + (3 * d + m) / t) * i, 1),
        ("cat", "backward", tokens * 6 * d / t * i, 1),
        ("_to_copy", "forward", tokens * d * (stream + i), 2 * (stream > i)),
        ("_to_copy", "backward", tokens * d * (stream + i), 2 * (stream > i)),
    )
    for name, phase, size, times in moved:
        if times:
            yield _memory(name, phase, size, times * count, s)
    if stream > i:  # autocast copies every weight to half precision, and every gradient back
        weights = (4 * d * d + 2 * d * m) / t
        yield _memory("_to_copy", "forward", weights / 4 * 6, 4 * count, s)
        yield _memory("_to_copy", "backward", weights / 4 * 6, 4 * count, s)
    yield from _state_copies(s)
    shards = mesh.state_shards if s.sharded else 1
    per_parameter, _ = UPDATE[s.update]
    update = per_parameter * s.rank_parameters / shards
    calls = 1 if s.update == "fused" else 14
    if s.update == "loop":
        calls *= TENSORS_PER_BLOCK * s.rank_blocks
    yield _memory("_fused_adamw_", "optimizer", update / calls, calls, s)


def _state_copies(s: Sizes) -> Iterator[OperatorTotal]:
    """Copies into and out of the buffers of collectives, and the division of gradients by the ranks."""
    blocks, parameters = s.rank_blocks, s.rank_parameters
    unit = parameters / blocks
    if s.sharded and s.mesh.state_shards > 1:
        phases, times = _gathers(s)
        gathers = blocks * times
        for phase in phases:
            yield _memory("all_gather_copy_in", phase, 2.2 * unit * s.gathered, gathers, s)
            yield _memory("split_with_sizes_copy", phase, 2 * unit * s.gathered, gathers, s)
        yield _memory("chunk_cat", "backward", 4.2 * unit * s.exchanged, blocks, s)
    elif s.mesh.gradient_shares > 1:
        yield _memory("copy_", "backward", 4 * unit * s.gradient, blocks, s)


def _gathers(s: Sizes) -> tuple[tuple[Phase, ...], int]:
    """Return the passes before which FSDP gathers a block, and how often in a step: stages keep it."""
    return (("forward",), 1) if s.mesh.pipeline > 1 else (("forward", "backward"), s.micro_batches)


def _attention(s: Sizes, count: int) -> Iterator[OperatorTotal]:
    mesh, n = s.mesh, s.tokens
    heads = max(1, s.heads // (mesh.tensor * mesh.sequence_parallel_size))
    width = s.width // s.heads
    shape = (s.micro_batch, heads, n, n, width)
    whole = 2 * prod(shape)
    again = count if s.recompute == "blocks" else 0
    if not s.fused_attention:
        batch = s.micro_batch * heads
        for rows, columns, inner in ((n, n, width), (n, width, n)):
            yield _product("bmm", "forward", (batch, rows, columns, inner), count, s)
            yield _product("bmm", "backward", (batch, rows, columns, inner), 2 * count + again, s)
        scores = batch * n * n * s.inner
        yield _memory("_softmax", "forward", 5 * scores, count, s)
        yield _memory("_softmax", "backward", 5 * scores, count + again, s)
        return
    half = 0.5 if s.causal else 1.0
    moved = 4 * s.micro_batch * heads * n * width * s.inner
    passes: tuple[tuple[str, Phase, float, int], ...] = (
        ("_scaled_dot_product_flash_attention", "forward", 2, count),
        ("_scaled_dot_product_flash_attention", "backward", 2, again),
        ("_scaled_dot_product_flash_attention_backward", "backward", 5, count),
    )
    for name, phase, products, times in passes:
        if times:
            yield OperatorTotal(
                kind="attention", name=name, phase=phase, dtype=s.compute, shape=shape,
                count=times, flops=round(products * half * whole * times),
                bytes_moved=moved * times,
            )  # fmt: skip


def _linear(rows: int, outputs: int, inputs: int, count: int, s: Sizes) -> Iterator[OperatorTotal]:
    """Forward, gradient by input, gradient by weight."""
    yield _product("addmm", "forward", (1, rows, outputs, inputs), count, s)
    yield _product("mm", "backward", (1, rows, inputs, outputs), count, s)
    yield _product(BY_WEIGHT, "backward", (1, outputs, inputs, rows), count, s)


def _product(
    name: str, phase: Phase, shape: tuple[int, int, int, int], count: int, s: Sizes
) -> OperatorTotal:
    batch, m, n, k = shape
    return OperatorTotal(
        kind="matmul", name=name, phase=phase, dtype=s.compute, shape=shape, count=count,
        flops=2 * prod(shape) * count,
        bytes_moved=s.inner * batch * (m * k + k * n + m * n) * count,
    )  # fmt: skip


def _memory(name: str, phase: str, size: float, count: int, s: Sizes) -> OperatorTotal:
    return OperatorTotal(
        kind="memory", name=name, phase=phase, dtype=s.compute,  # type: ignore[arg-type]
        shape=(round(size / 4),),
        count=count, flops=0, bytes_moved=round(size * count),
    )  # fmt: skip


def _collectives(s: Sizes) -> Iterator[CollectiveTotal]:
    mesh, blocks, unit = s.mesh, s.rank_blocks, s.rank_unit
    if s.sharded and mesh.state_shards > 1:
        group = _group(s, *STATE_AXES)
        phases, times = _gathers(s)
        for phase in phases:
            yield _exchange(
                "all_gather", "parameter", phase, unit * s.gathered, blocks * times, group
            )
        yield _exchange("reduce_scatter", "gradient", "backward", unit * s.exchanged, blocks, group)
        edge = s.rank_edge
        yield _exchange("all_gather", "parameter", "forward", edge * s.gathered, times, group)
        yield _exchange("reduce_scatter", "gradient", "backward", edge * s.exchanged, 1, group)
        if mesh.replicate > 1:
            shard = unit * s.exchanged / mesh.state_shards
            replicas = _group(s, "replicate")
            yield _exchange("all_reduce", "gradient", "backward", shard, blocks + 1, replicas)
    elif mesh.gradient_shares > 1:
        size = s.gradient * s.rank_parameters
        buckets = max(1, ceil(size / BUCKET_BYTES))
        group = _group(s, *GRADIENT_AXES)
        yield _exchange("all_reduce", "gradient", "backward", size / buckets, buckets, group)
    yield from _activations(s)


def _activations(s: Sizes) -> Iterator[CollectiveTotal]:
    mesh, count = s.mesh, s.rank_blocks * s.micro_batches
    tokens, d = s.rank_tokens, s.width
    again = count if s.recompute != "none" else 0
    if mesh.tensor > 1:
        group = _group(s, "tensor")
        inner = tokens * d * s.inner
        yield _exchange("all_reduce", "activation", "forward", inner, 2 * count, group)
        yield _exchange("all_reduce", "activation", "backward", inner, 2 * count + again, group)
    if mesh.sequence_parallel_size > 1:
        share, group = tokens * d * s.inner / mesh.tensor, _group(s, *SEQUENCE_AXES)
        yield _exchange("all_to_all", "activation", "forward", share, 4 * count, group)
        yield _exchange("all_to_all", "activation", "backward", share, 4 * (count + again), group)
        whole = tokens * group[0] * d * s.stream  # the head reads all tokens
        yield _exchange("all_gather", "activation", "forward", whole, s.micro_batches, group)
    if mesh.pipeline > 1:
        sent, (_, nodes) = tokens * d * s.stream, _group(s, "pipeline")
        for phase in ("forward", "backward"):
            yield _exchange("send", "activation", phase, sent, s.micro_batches, (2, min(2, nodes)))


def _group(s: Sizes, *axes: str) -> tuple[int, int]:
    """Return (ranks, nodes) of a group along axes; the last axis of `AXES` lies on adjacent ranks."""
    ranks = prod(getattr(s.mesh, axis) for axis in axes)
    if ranks == 1:
        return 1, 1
    used = [AXES.index(axis) for axis in axes if getattr(s.mesh, axis) > 1]
    stride = prod(getattr(s.mesh, axis) for axis in AXES[max(used) + 1 :])
    span = prod(getattr(s.mesh, axis) for axis in AXES[min(used) :])
    nodes = ceil(span / s.ranks_per_node)
    per_node = max(1, s.ranks_per_node // stride)
    return ranks, max(1, min(nodes, ceil(ranks / per_node)))


def _exchange(
    name: str, purpose: str, phase: str, size: float, count: int, group: tuple[int, int]
) -> CollectiveTotal:
    ranks, nodes = group
    passes = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(name, (ranks - 1) / ranks)
    return CollectiveTotal(
        name=name, purpose=purpose, phase=phase, group_ranks=ranks, group_nodes=nodes,  # type: ignore[arg-type]
        count=count, bytes_whole=round(size), bytes_sent=size * passes * count,
    )  # fmt: skip
