"""Shapes of a transformer, its number formats and its layout over ranks, and the memory they need (no torch).

Letters as in `closed_trace`: T tokens of a rank, D width, M width of the MLP, t tensor degree.
"""

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from vitsweep.predict.step_trace import MemoryParts
from vitsweep.spec.resources import AXES, MeshShape


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A stack of equal pre-norm blocks between an embedding and a head.

    Attributes:
        depth: number of blocks.
        width: D.
        heads: of attention.
        mlp_width: M.
        tokens: N, of one image.
        edge_parameters: of embedding, positions, last norm and head together.
        edge_products: (m, n, k) of the products outside the blocks per image, forward; the first is the
            embedding, whose input needs no gradient.
        causal: whether kernels leave out the masked half of the scores.
        fused_attention: False where scores are written to memory.
    """

    depth: int
    width: int
    heads: int
    mlp_width: int
    tokens: int
    edge_parameters: int
    edge_products: tuple[tuple[int, int, int], ...] = ()
    causal: bool = False
    fused_attention: bool = True

    @property
    def block_parameters(self) -> int:
        """Of one block: four matrices, their biases, two norms."""
        d, m = self.width, self.mlp_width
        return 4 * d * d + 2 * d * m + 9 * d + m

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.depth * self.block_parameters + self.edge_parameters


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes of numbers.

    Attributes:
        compute: dtype of the products.
        stream: bytes of a number between blocks.
        inner: bytes of a number inside attention and MLP.
        parameter: bytes of a parameter held, of a shard where it is sharded.
        gradient: bytes of a gradient held.
        optimizer: bytes of moments and float32 masters per parameter.
        gathered: bytes of a gathered parameter.
        exchanged: bytes of a gradient that is exchanged.
    """

    compute: str = "bfloat16"
    stream: int = 4
    inner: int = 2
    parameter: int = 4
    gradient: int = 4
    optimizer: int = 8
    gathered: int = 4
    exchanged: int = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step is spread over ranks.

    Attributes:
        mesh: degrees; `ulysses` is the sequence degree.
        ranks_per_node: consecutive ranks that share a node.
        micro_batch: images of one forward pass on one replica.
        micro_batches: forward passes of a step: pipeline micro-batches or accumulation.
        stages_per_rank: of an interleaved pipeline.
        sharded: parameters in shards that are gathered for every use.
        recompute: what the backward pass computes again.
        update: implementation of AdamW.
    """

    mesh: MeshShape
    ranks_per_node: int
    micro_batch: int
    micro_batches: int = 1
    stages_per_rank: int = 1
    sharded: bool = False
    recompute: Literal["none", "selected", "blocks"] = "none"
    update: Literal["fused", "foreach", "loop"] = "fused"

    def group(self, *axes: str) -> tuple[int, int]:
        """Return (ranks, nodes) of a group along axes; the last axis of `AXES` lies on adjacent ranks."""
        ranks = prod(getattr(self.mesh, axis) for axis in axes)
        if ranks == 1:
            return 1, 1
        innermost = max(AXES.index(a) for a in axes if getattr(self.mesh, a) > 1)
        stride = prod(getattr(self.mesh, axis) for axis in AXES[innermost + 1 :])
        outermost = min(AXES.index(a) for a in axes if getattr(self.mesh, a) > 1)
        span = prod(getattr(self.mesh, axis) for axis in AXES[outermost:])
        nodes = ceil(span / self.ranks_per_node)
        per_node = max(1, self.ranks_per_node // stride)
        return ranks, max(1, min(nodes, ceil(ranks / per_node)))


def rank_parameters(model: Transformer, layout: Layout) -> float:
    """Parameters of one rank before they are sharded: its blocks, split by tensor, and one edge."""
    d, m, t = model.width, model.mlp_width, layout.mesh.tensor
    split = (4 * d * d + 2 * d * m + 3 * d + m) / t
    whole = 6 * d
    edges = model.edge_parameters / (2 if layout.mesh.pipeline > 1 else 1)
    return rank_blocks(model, layout) * (split + whole) + edges


def memory(model: Transformer, layout: Layout, formats: Formats) -> MemoryParts:
    """Return the bytes of one rank; the peak is that of the backward pass of the first micro-batch."""
    shards = layout.mesh.state_shards if layout.sharded else 1
    parameters = rank_parameters(model, layout)
    blocks = rank_blocks(model, layout)
    unit = (parameters - rank_edge(model, layout)) / blocks
    in_flight = min(layout.micro_batches, layout.mesh.pipeline)
    accumulates = layout.sharded and layout.micro_batches > 1
    held = {
        "parameters": formats.parameter * parameters / shards,
        "gradients": formats.gradient * parameters / shards,
        "optimizer": formats.optimizer * parameters / shards,
        "activations": in_flight * blocks * _kept(model, layout, formats) + _working(model, layout, formats),
        "gathered": layout.sharded * (2 * unit + rank_edge(model, layout)) * formats.gathered
        + layout.sharded * formats.exchanged * (parameters if accumulates else unit),
        "buffers": _waiting(model, layout, formats),
    }  # fmt: skip
    if formats.stream > formats.inner:
        held["activations"] += (
            formats.inner * parameters
        )  # autocast keeps its copies until backward
    whole = {part: round(value) for part, value in held.items()}
    return MemoryParts(**whole, peak=sum(whole.values()))


def rank_blocks(model: Transformer, layout: Layout) -> int:
    """Blocks of the fullest rank."""
    return ceil(model.depth / layout.mesh.pipeline)


def rank_edge(model: Transformer, layout: Layout) -> float:
    """Parameters of a rank outside its blocks; the stages at either end of a pipeline share them."""
    return model.edge_parameters / (2 if layout.mesh.pipeline > 1 else 1)


def rank_tokens(model: Transformer, layout: Layout) -> int:
    """Tokens of a rank in one micro-batch, padding included."""
    return layout.micro_batch * ceil(model.tokens / layout.mesh.sequence_parallel_size)


def _waiting(model: Transformer, layout: Layout, formats: Formats) -> float:
    """Bytes that the first stage of a pipeline holds throughout a step; 0 without a pipeline.

    The images of all micro-batches, and for each of them what was sent and a buffer that receives its
    gradient, as traces of `torch.distributed.pipelining` show.
    """
    if layout.mesh.pipeline == 1:
        return 0.0
    rows, _, inputs = model.edge_products[0] if model.edge_products else (0, 0, 0)
    images = 4 * layout.micro_batch * rows * inputs
    sent = layout.stages_per_rank * rank_tokens(model, layout) * model.width * formats.stream
    return layout.micro_batches * (images + 2 * sent)


def _kept(model: Transformer, layout: Layout, formats: Formats) -> float:
    """Bytes of activations of one block that one micro-batch keeps for the backward pass."""
    tokens, d, m, t = rank_tokens(model, layout), model.width, model.mlp_width, layout.mesh.tensor
    if layout.recompute == "blocks":
        return tokens * d * formats.stream
    norms = 0 if layout.recompute == "selected" else 2 * d
    hidden = m / t if layout.recompute == "selected" else 2 * m / t
    inner = norms + 4 * d / t + hidden
    stream = 2 * d * formats.stream
    scores = 0.0
    if not model.fused_attention:
        scores = 2.5 * model.heads / t * model.tokens  # scores, softmax, dropout's mask
    return tokens * (stream + formats.inner * (inner + scores) + 16 + 4 * model.heads / t)


def _working(model: Transformer, layout: Layout, formats: Formats) -> float:
    """Bytes that the block at work needs beside what is kept."""
    tokens, d, m, t = rank_tokens(model, layout), model.width, model.mlp_width, layout.mesh.tensor
    working = tokens * (2 * d * formats.stream + formats.inner * (2 * m / t + 3 * d / t))
    if layout.recompute != "none":
        working += _kept(model, replace(layout, recompute="none"), formats)
    return working
