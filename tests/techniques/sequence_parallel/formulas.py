"""Bytes that each method sends per rank and step, from sizes alone: what counters must equal.

n ranks share tokens; L is a rank's share of the sharded axis, padding included; the other axis of a
multi-dimensional model counts as images. All-gather, reduce-scatter and all-to-all of a tensor of b
bytes (the gathered one) send (n-1)/n b from each rank, a point-to-point message b.
"""

from dataclasses import dataclass

from vitsweep.objectives.dit_spec import STDiTSpec
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_parallel import BYTES, axis_lengths, padded_share

LOSS_BYTES = 8
"""The mean loss goes to all stages of a pipeline, in float64."""


@dataclass(frozen=True)
class Volume:
    """Sizes of the activations that a cell sends.

    Attributes:
        images: of one step and replica.
        block_images: of these, how many each block computes.
        width: D.
        stream: bytes of a number between blocks.
        inner: bytes of a number inside attention and MLP, half of `stream` under autocast.
        forwards: forward passes of a block per step: 2 under recomputation.
    """

    images: int
    block_images: int
    width: int
    stream: int
    inner: int
    forwards: int

    @classmethod
    def of(cls, cell: CellSpec) -> "Volume":
        plan, shape = cell.precision.plan(), cell.transformer
        kept, of = shape.computed_images
        images = cell.micro_batch * cell.batch.accumulation_steps
        return cls(
            images=images,
            block_images=images * kept // of,
            width=shape.width,
            stream=BYTES[plan.param_dtype],
            inner=BYTES[plan.autocast_dtype or plan.param_dtype],
            forwards=cell.memory.forwards_per_step,
        )

    @property
    def wide(self) -> int:
        """Bytes of a number where sums are kept: float32 at least."""
        return max(4, self.inner)


def remote(ranks: int) -> float:
    """The share of a tensor that belongs to other ranks."""
    return (ranks - 1) / ranks


def sent(cell: CellSpec) -> dict[str, float]:
    """Bytes that a rank sends in one step, mean over ranks, by purpose."""
    methods = (cell.sequence_parallel, cell.tensor_parallel, cell.pipeline_parallel)
    found = [FORMULAS[type(method).__name__](cell) for method in methods if method.axes]
    purposes = dict.fromkeys(purpose for each in found for purpose in each)
    return {purpose: sum(each.get(purpose, 0.0) for each in found) for purpose in purposes}


def attending_blocks(cell: CellSpec) -> int:
    """Blocks that attend along the first axis, the one that is sharded."""
    return cell.transformer.depth // cell.transformer.num_sequence_axes


def attended(cell: CellSpec) -> float:
    """Bytes of q (or k, v, o) of this rank's tokens and heads in all attentions along them."""
    size, [tokens, *_] = Volume.of(cell), cell.sequence_parallel.tokens_per_rank(cell)
    local = size.block_images * tokens * size.width // cell.mesh.tensor
    return attending_blocks(cell) * local * size.inner


def gathered_at_the_end(cell: CellSpec) -> float:
    """The one all-gather of tokens before the head; its backward sends nothing."""
    size, ranks = Volume.of(cell), cell.mesh.sequence_parallel_size
    [tokens, *_] = cell.sequence_parallel.tokens_per_rank(cell)
    return remote(ranks) * size.images * ranks * tokens * size.width * size.stream


def all_to_alls(cell: CellSpec) -> float:
    """q, k, v there and o back: 4 (u-1)/u per forward pass, and as much per backward pass."""
    return (Volume.of(cell).forwards + 1) * 4 * remote(cell.mesh.ulysses) * attended(cell)


def hops(cell: CellSpec) -> float:
    """K and V make r-1 hops per pass; their gradients, in float32 at least, r hops."""
    size, ranks = Volume.of(cell), cell.mesh.ring
    if ranks == 1:
        return 0.0
    of_kv = (size.forwards + 1) * (ranks - 1) + ranks * size.wide / size.inner
    return 2 * of_kv * attended(cell)


def states(cell: CellSpec) -> float:
    """Bytes of the states of all attentions along the sharded axis, float32 at least."""
    size, (_, *rest) = Volume.of(cell), axis_lengths(cell)
    images = size.block_images * (rest[0] if rest else 1)
    heads = cell.transformer.num_heads // cell.mesh.tensor
    per_head = (size.width // cell.transformer.num_heads) ** 2
    return attending_blocks(cell) * images * heads * per_head * size.wide


def ulysses(cell: CellSpec) -> dict[str, float]:
    return {"activation": all_to_alls(cell) + gathered_at_the_end(cell)}


def ring(cell: CellSpec) -> dict[str, float]:
    """All-to-alls are those of USP; a ring alone has none."""
    return {"activation": all_to_alls(cell) + hops(cell) + gathered_at_the_end(cell)}


def lss(cell: CellSpec) -> dict[str, float]:
    """K and V to n - 1 ranks per forward pass, their gradients back."""
    of_kv = 2 * (cell.mesh.sequence_parallel_size - 1) * attended(cell)
    return {"activation": (Volume.of(cell).forwards + 1) * of_kv + gathered_at_the_end(cell)}


def lasp(cell: CellSpec) -> dict[str, float]:
    """n-1 states per attention and pass, or one in a chain whose last rank sends none."""
    ranks = cell.mesh.sequence_parallel_size
    of_states = remote(ranks) if cell.sequence_parallel.chain else ranks - 1  # type: ignore[attr-defined]
    passes = Volume.of(cell).forwards + 1
    return {"activation": passes * of_states * states(cell) + gathered_at_the_end(cell)}


def switches(cell: CellSpec) -> float:
    """One all-to-all between blocks forward, and one backward; recomputation repeats none."""
    (x, y), ranks, size = axis_lengths(cell), cell.mesh.sequence_parallel_size, Volume.of(cell)
    padded = ranks * padded_share(x, ranks) * padded_share(y, ranks)  # both, while on their way
    message = size.images * padded * size.width * size.stream
    return 2 * (cell.transformer.depth - 1) * remote(ranks) * message


def dsp(cell: CellSpec) -> dict[str, float]:
    """The all-to-alls between blocks, and the all-gather before the head."""
    (x, y), ranks, size = axis_lengths(cell), cell.mesh.sequence_parallel_size, Volume.of(cell)
    last = x * ranks * padded_share(y, ranks)
    if cell.transformer.depth % 2:
        last = ranks * padded_share(x, ranks) * y
    whole = size.images * last * size.width * size.stream
    return {"activation": switches(cell) + remote(ranks) * whole}


def pairs(cell: CellSpec) -> int:
    """Pairs of split matrices of a block: attention, MLP, and in an STDiT attention to the text."""
    return 3 if isinstance(cell.model, STDiTSpec) else 2


def repeated_sums(cell: CellSpec) -> int:
    """Sums of a block that a recomputation repeats: a gate's gradient needs that of the last pair too."""
    return pairs(cell) - (not cell.model.has_context)


def beside_tokens(cell: CellSpec) -> dict[str, float]:
    """Gradients that ranks with a part of the tokens or heads sum in each block of a DiT or STDiT.

    Of six modulations, where tokens are shared; of the text, whose keys and values are split by heads; and
    of the weights of norms of queries and keys. An STDiT adds its table to the modulations before.
    """
    if not cell.model.has_context:
        return {"modulations": 0, "text and norms": 0}
    size, width = Volume.of(cell), cell.transformer.width
    six, other = 6 * size.images * width * size.inner, 0
    if isinstance(cell.model, STDiTSpec):
        six = 6 * size.images * width * size.stream
        vectors = cell.model.text_vectors if cell.model.text_width else 1
        of_norms = cell.batch.accumulation_steps * 2 * width // cell.transformer.num_heads
        other = size.images * vectors * width * size.inner + of_norms * size.stream
    each = 2 * remote(cell.mesh.tensor) * cell.transformer.depth
    return {"modulations": each * six, "text and norms": each * other}


def megatron_sp(cell: CellSpec) -> dict[str, float]:
    """An all-gather and a reduce-scatter per pair of matrices and pass, one gather at either end.

    Recomputation repeats all of a forward pass but its last reduce-scatter. Norms and biases
    outside the split matrices see own tokens: their gradients are all-reduced, once per step
    and in the dtype and shards in which the optimizer gets them.
    """
    size, ranks, depth = Volume.of(cell), cell.mesh.tensor, cell.transformer.depth
    first, *rest = axis_lengths(cell)
    padded = ranks * padded_share(first, ranks) * (rest[0] if rest else 1)
    image = remote(ranks) * padded * size.width
    again = pairs(cell) + repeated_sums(cell)
    per_block = (4 * pairs(cell) + again * (size.forwards - 1)) * size.inner
    plan, sharded = cell.precision.plan(), cell.sharding.shards_parameters
    masters = sharded and plan.master_weights
    of_norm, of_bias = (4, 4) if masters else (BYTES[plan.norm_dtype], size.stream)
    shards = cell.mesh.state_shards if sharded else 1
    shape = cell.transformer
    norms = 2 * depth * (1 if shape.parallel_branches else 2) + 2 if shape.norm_weights else 0
    biases = (pairs(cell) + (2 if shape.layer_scale else 0)) * depth  # with LayerScale's factors
    small = (norms * of_norm + biases * of_bias) * size.width / shards
    blocks = image * size.block_images * depth * per_block
    return {
        "activation": blocks
        + image * size.images * 2 * size.stream
        + sum(beside_tokens(cell).values()),
        "gradient": 2 * remote(ranks) * small,
    }


def megatron(cell: CellSpec) -> dict[str, float]:
    """An all-reduce per pair of matrices and pass, some of which a recomputation repeats."""
    size, tokens = Volume.of(cell), sum(cell.sequence_parallel.tokens_per_rank(cell))
    sums = 2 * pairs(cell) + (size.forwards - 1) * repeated_sums(cell)
    whole = size.block_images * tokens * size.width * sums * size.inner
    of_heads = beside_tokens(cell)["text and norms"]
    return {"activation": 2 * remote(cell.mesh.tensor) * whole + of_heads}


def pipeline(cell: CellSpec) -> dict[str, float]:
    """Tokens forward and their gradients backward over every border, and the loss to all.

    Mean over ranks: the last stage sends nothing forward, the first nothing backward.
    """
    size, ranks = Volume.of(cell), cell.mesh.pipeline
    depth = cell.transformer.depth
    per_block = cell.sequence_parallel.tokens_per_rank(cell)
    # What enters a stage is still sharded as its predecessor's last block left it.
    borders = sum(per_block[stage * depth // ranks - 1] for stage in range(1, ranks))
    both_ways = 2 * size.images * borders * size.width * size.stream
    return {"activation": both_ways / ranks + 2 * remote(ranks) * LOSS_BYTES}


FORMULAS = {
    "Ulysses": ulysses, "Ring": ring, "Usp": ring, "Dsp": dsp,
    "LongSequenceSegmentation": lss, "Lasp": lasp, "Lasp2": lasp, "MegatronSp": megatron_sp,
    "Megatron": megatron, "Schedule": pipeline,
}  # fmt: skip
"""Class of a technique -> its formula."""
