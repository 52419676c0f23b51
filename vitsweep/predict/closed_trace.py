"""The trace of a step by closed formulas, for transformers of equal blocks: microseconds instead of seconds.

It serves the search over layouts, whose thousands of candidates cannot all be traced, and models of
which no code is here. Letters: b images of a micro-batch, T tokens of a rank in it, D width, M width of
the MLP; t tensor, s sequence, p pipeline degree.
"""

from collections.abc import Iterator
from math import ceil, prod

from vitsweep.predict.closed_memory import (
    Formats,
    Layout,
    Transformer,
    memory,
    rank_blocks,
    rank_edge,
    rank_parameters,
    rank_tokens,
)
from vitsweep.predict.step_trace import CollectiveTotal, OperatorTotal, Phase, StepTrace

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


def closed_trace(model: Transformer, layout: Layout, formats: Formats) -> StepTrace:
    """Return the step of the rank with most to do."""
    mesh = layout.mesh
    operators = tuple(_operators(model, layout, formats))
    collectives = tuple(_collectives(model, layout, formats))
    blocks = rank_blocks(model, layout)
    passes = layout.micro_batches * blocks
    forward, backward = (
        DISPATCHES[phase]
        + layout.sharded * SHARDED_DISPATCHES[phase]
        + (mesh.sequence_parallel_size > 1) * SEQUENCE_DISPATCHES[phase]
        for phase in ("forward", "backward")
    )
    backward += RECOMPUTED_DISPATCHES * (layout.recompute != "none")
    tensors = TENSORS_PER_BLOCK * blocks + 6
    _, per_update = UPDATE[layout.update]
    return StepTrace(
        operators=operators,
        collectives=collectives,
        memory=memory(model, layout, formats),
        dispatches={
            "forward": forward * passes,
            "backward": backward * passes,
            "optimizer": per_update * (tensors if layout.update == "loop" else 2),
        },
        parameters=model.parameters,
        flops_per_step=sum(operator.flops for operator in operators),
        images_per_step=layout.micro_batch * layout.micro_batches * mesh.data_parallel_size,
        ranks=mesh.world_size,
        device="cuda",
        pipeline_ranks=mesh.pipeline,
        pipeline_chunks=layout.micro_batches * layout.stages_per_rank,
    )


def _operators(model: Transformer, layout: Layout, formats: Formats) -> Iterator[OperatorTotal]:
    mesh, b = layout.mesh, layout.micro_batch
    tokens, d, m, t = rank_tokens(model, layout), model.width, model.mlp_width, mesh.tensor
    count = rank_blocks(model, layout) * layout.micro_batches
    linears = [
        (tokens, 3 * d // t, d),
        (tokens, d, d // t),
        (tokens, m // t, d),
        (tokens, d, m // t),
    ]
    for shape in linears:
        yield from _linear(*shape, count, formats)
    if layout.recompute == "blocks":
        for shape in linears[:-1]:  # the result of the last product is not needed again
            yield _product("addmm", "backward", (1, *shape), count, formats)
    yield from _attention(model, layout, formats, count)
    for place, (rows, outputs, inputs) in enumerate(model.edge_products):
        products = list(_linear(b * rows, outputs, inputs, layout.micro_batches, formats))
        yield from products if place else (products[0], products[2])  # images need no gradient
    again = 1 if layout.recompute != "none" else 0
    s, i = formats.stream, formats.inner
    moved: tuple[tuple[str, Phase, float, int], ...] = (
        ("native_layer_norm", "forward", tokens * d * (s + i), 2),
        ("gelu", "forward", tokens * m / t * 2 * i, 1),
        ("add", "forward", tokens * d * (2 * s + i), 2),
        ("native_layer_norm", "backward", tokens * d * (s + i), 2 * again),
        ("gelu", "backward", tokens * m / t * 2 * i, again),
        ("add", "backward", tokens * d * (2 * s + i), again * (layout.recompute == "blocks")),
        ("native_layer_norm_backward", "backward", tokens * d * (2 * s + i), 2),
        ("gelu_backward", "backward", tokens * m / t * 3 * i, 1),
        ("add", "backward", tokens * d * 3 * s, 2),
        ("sum", "backward", tokens * (2 * d + (3 * d + m) / t) * i, 1),
        ("cat", "backward", tokens * 6 * d / t * i, 1),
        ("_to_copy", "forward", tokens * d * (s + i), 2 * (s > i)),
        ("_to_copy", "backward", tokens * d * (s + i), 2 * (s > i)),
    )
    for name, phase, size, times in moved:
        if times:
            yield _memory(name, phase, size, times * count, formats)
    if s > i:  # autocast copies every weight to half precision, and every gradient back
        weights = (4 * d * d + 2 * d * m) / t
        yield _memory("_to_copy", "forward", weights / 4 * 6, 4 * count, formats)
        yield _memory("_to_copy", "backward", weights / 4 * 6, 4 * count, formats)
    yield from _state_copies(model, layout, formats)
    shards = mesh.state_shards if layout.sharded else 1
    per_parameter, _ = UPDATE[layout.update]
    update = per_parameter * rank_parameters(model, layout) / shards
    calls = 1 if layout.update == "fused" else 14
    if layout.update == "loop":
        calls *= TENSORS_PER_BLOCK * rank_blocks(model, layout)
    yield _memory("_fused_adamw_", "optimizer", update / calls, calls, formats)


def _state_copies(model: Transformer, layout: Layout, formats: Formats) -> Iterator[OperatorTotal]:
    """Copies into and out of the buffers of collectives, and the division of gradients by the ranks."""
    blocks, parameters = rank_blocks(model, layout), rank_parameters(model, layout)
    unit = parameters / blocks
    if layout.sharded and layout.mesh.state_shards > 1:
        gathers = blocks * layout.micro_batches
        for phase in ("forward", "backward"):
            yield _memory(
                "all_gather_copy_in", phase, 2.2 * unit * formats.gathered, gathers, formats
            )
            yield _memory(
                "split_with_sizes_copy", phase, 2 * unit * formats.gathered, gathers, formats
            )
        yield _memory("chunk_cat", "backward", 4.2 * unit * formats.exchanged, blocks, formats)
    elif layout.mesh.gradient_shares > 1:
        yield _memory("copy_", "backward", 4 * unit * formats.gradient, blocks, formats)


def _attention(
    model: Transformer, layout: Layout, formats: Formats, count: int
) -> Iterator[OperatorTotal]:
    mesh, n = layout.mesh, model.tokens
    heads = max(1, model.heads // (mesh.tensor * mesh.sequence_parallel_size))
    width = model.width // model.heads
    shape = (layout.micro_batch, heads, n, n, width)
    whole = 2 * prod(shape)
    again = count if layout.recompute == "blocks" else 0
    if not model.fused_attention:
        batch = layout.micro_batch * heads
        for rows, columns, inner in ((n, n, width), (n, width, n)):
            yield _product("bmm", "forward", (batch, rows, columns, inner), count, formats)
            yield _product(
                "bmm", "backward", (batch, rows, columns, inner), 2 * count + again, formats
            )
        scores = batch * n * n * formats.inner
        yield _memory("_softmax", "forward", 5 * scores, count, formats)
        yield _memory("_softmax", "backward", 5 * scores, count + again, formats)
        return
    half = 0.5 if model.causal else 1.0
    moved = 4 * layout.micro_batch * heads * n * width * formats.inner
    passes: tuple[tuple[str, Phase, float, int], ...] = (
        ("_scaled_dot_product_flash_attention", "forward", 2, count),
        ("_scaled_dot_product_flash_attention", "backward", 2, again),
        ("_scaled_dot_product_flash_attention_backward", "backward", 5, count),
    )
    for name, phase, products, times in passes:
        if times:
            yield OperatorTotal(
                kind="attention", name=name, phase=phase, dtype=formats.compute, shape=shape,
                count=times, flops=round(products * half * whole * times),
                bytes_moved=moved * times,
            )  # fmt: skip


def _linear(
    rows: int, outputs: int, inputs: int, count: int, formats: Formats
) -> Iterator[OperatorTotal]:
    """Forward, gradient by input, gradient by weight."""
    yield _product("addmm", "forward", (1, rows, outputs, inputs), count, formats)
    yield _product("mm", "backward", (1, rows, inputs, outputs), count, formats)
    yield _product("mm", "backward", (1, outputs, inputs, rows), count, formats)


def _product(
    name: str, phase: Phase, shape: tuple[int, int, int, int], count: int, formats: Formats
) -> OperatorTotal:
    batch, m, n, k = shape
    return OperatorTotal(
        kind="matmul", name=name, phase=phase, dtype=formats.compute, shape=shape, count=count,
        flops=2 * prod(shape) * count,
        bytes_moved=formats.inner * batch * (m * k + k * n + m * n) * count,
    )  # fmt: skip


def _memory(name: str, phase: str, size: float, count: int, formats: Formats) -> OperatorTotal:
    return OperatorTotal(
        kind="memory", name=name, phase=phase, dtype=formats.compute,  # type: ignore[arg-type]
        shape=(round(size / 4),),
        count=count, flops=0, bytes_moved=round(size * count),
    )  # fmt: skip


def _collectives(model: Transformer, layout: Layout, formats: Formats) -> Iterator[CollectiveTotal]:
    mesh, blocks, micro = layout.mesh, rank_blocks(model, layout), layout.micro_batches
    parameters = rank_parameters(model, layout)
    unit = (parameters - rank_edge(model, layout)) / blocks
    if layout.sharded and mesh.state_shards > 1:
        group = layout.group(*STATE_AXES)
        for phase in ("forward", "backward"):
            yield _exchange(
                "all_gather", "parameter", phase, unit * formats.gathered, blocks * micro, group
            )
        yield _exchange(
            "reduce_scatter", "gradient", "backward", unit * formats.exchanged, blocks, group
        )
        edge = rank_edge(model, layout)
        yield _exchange("all_gather", "parameter", "forward", edge * formats.gathered, micro, group)
        yield _exchange(
            "reduce_scatter", "gradient", "backward", edge * formats.exchanged, 1, group
        )
        if mesh.replicate > 1:
            shard = unit * formats.exchanged / mesh.state_shards
            replicas = layout.group("replicate")
            yield _exchange("all_reduce", "gradient", "backward", shard, blocks + 1, replicas)
    elif mesh.gradient_shares > 1:
        size = formats.gradient * parameters
        buckets = max(1, ceil(size / BUCKET_BYTES))
        group = layout.group(*GRADIENT_AXES)
        yield _exchange("all_reduce", "gradient", "backward", size / buckets, buckets, group)
    yield from _activations(model, layout, formats)


def _activations(model: Transformer, layout: Layout, formats: Formats) -> Iterator[CollectiveTotal]:
    mesh, count = layout.mesh, rank_blocks(model, layout) * layout.micro_batches
    tokens, d = rank_tokens(model, layout), model.width
    again = count if layout.recompute != "none" else 0
    if mesh.tensor > 1:
        group = layout.group("tensor")
        inner, stream = tokens * d * formats.inner, tokens * d * formats.stream
        yield _exchange("all_reduce", "activation", "forward", inner, 2 * count, group)
        yield _exchange("all_reduce", "activation", "backward", stream, 2 * count, group)
        yield _exchange("all_reduce", "activation", "backward", inner, again, group)
    if mesh.sequence_parallel_size > 1:
        share, group = tokens * d * formats.inner / mesh.tensor, layout.group(*SEQUENCE_AXES)
        yield _exchange("all_to_all", "activation", "forward", share, 4 * count, group)
        yield _exchange("all_to_all", "activation", "backward", share, 4 * (count + again), group)
        whole = tokens * group[0] * d * formats.stream  # the head reads all tokens
        yield _exchange("all_gather", "activation", "forward", whole, layout.micro_batches, group)
    if mesh.pipeline > 1:
        sent, (_, nodes) = tokens * d * formats.stream, layout.group("pipeline")
        times = layout.micro_batches * layout.stages_per_rank
        for phase in ("forward", "backward"):
            yield _exchange("send", "activation", phase, sent, times, (2, min(2, nodes)))


def _exchange(
    name: str, purpose: str, phase: str, size: float, count: int, group: tuple[int, int]
) -> CollectiveTotal:
    ranks, nodes = group
    passes = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(name, (ranks - 1) / ranks)
    return CollectiveTotal(
        name=name, purpose=purpose, phase=phase, axis="", group_ranks=ranks, group_nodes=nodes,  # type: ignore[arg-type]
        count=count, bytes_whole=round(size), bytes_sent=size * passes * count,
    )  # fmt: skip
