"""The sizes that a transformer's step follows from, and its memory by closed formulas (no torch).

T tokens of a rank, D width, M width of the MLP, t tensor degree.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from vitsweep.model.flops import num_parameters
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_parallel import BYTES
from vitsweep.spec.resources import MeshShape

RECOMPUTE = {"keep_all": "none", "recompute_selected": "selected", "recompute_blocks": "blocks"}


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """Bytes of one rank.

    Attributes:
        parameters: held between steps; shards where they are sharded.
        gradients: held before the update.
        optimizer: moments, and float32 copies of parameters in lower precision.
        activations: alive at the peak of forward and backward besides all others.
        gathered: parameters gathered from the shards of all ranks, alive at that peak.
        buffers: held for the whole run besides these: buckets of DDP.
        peak: largest sum of all that is alive at one moment of the step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    buffers: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas read of a cell: a stack of equal pre-norm blocks between an embedding and a head.

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
        compute: dtype of the products.
        stream: bytes of a number between blocks.
        inner: bytes of a number inside attention and MLP.
        parameter: bytes of a parameter held, of a shard where it is sharded.
        gradient: bytes of a gradient held.
        optimizer: bytes of moments and float32 masters per parameter.
        gathered: bytes of a gathered parameter.
        exchanged: bytes of a gradient that is exchanged.
        mesh: degrees; `ulysses` is the sequence degree.
        ranks_per_node: consecutive ranks that share a node.
        micro_batch: images of one forward pass on one replica.
        micro_batches: forward passes of a step: pipeline micro-batches or accumulation.
        sharded: parameters in shards that are gathered for every use.
        recompute: what the backward pass computes again.
        update: implementation of AdamW.
    """

    depth: int
    width: int
    heads: int
    mlp_width: int
    tokens: int
    edge_parameters: int
    edge_products: tuple[tuple[int, int, int], ...]
    causal: bool = False
    fused_attention: bool = True
    compute: str = "bfloat16"
    stream: int = 4
    inner: int = 2
    parameter: int = 4
    gradient: int = 4
    optimizer: int = 8
    gathered: int = 4
    exchanged: int = 4
    mesh: MeshShape
    ranks_per_node: int
    micro_batch: int
    micro_batches: int = 1
    sharded: bool = False
    recompute: Literal["none", "selected", "blocks"] = "none"
    update: Literal["fused", "foreach", "loop"] = "fused"

    @classmethod
    def of(cls, cell: CellSpec) -> "Sizes":
        """Return the sizes of a cell with a transformer."""
        spec, side, pooling = cell.transformer, cell.batch.resolution_px, cell.classifier.pooling
        pipelined = cell.mesh.pipeline > 1
        parts = cell.pipeline_parallel.microbatches if pipelined else cell.batch.accumulation_steps
        update = cell.optimizer.name.rpartition("_")[2]
        sizes = cls(
            depth=spec.depth,
            width=spec.width,
            heads=spec.num_heads,
            mlp_width=spec.mlp_width * spec.mlp_matrices // 2,
            tokens=spec.num_tokens(side, pooling),
            edge_parameters=0,
            edge_products=(
                ((side // spec.patch_px) ** 2, spec.width, spec.in_channels * spec.patch_px**2),
                (1, spec.num_classes, spec.width),
            ),
            mesh=cell.mesh,
            ranks_per_node=cell.resources.ranks_per_node,
            micro_batch=cell.micro_batch // (parts if pipelined else 1),
            micro_batches=parts,
            sharded=cell.sharding.shards_parameters,
            recompute=RECOMPUTE.get(cell.memory.name, "none"),  # type: ignore[arg-type]
            update=update if update in ("fused", "loop") else "foreach",  # type: ignore[arg-type]
        )
        edge = num_parameters(spec, side, pooling) - sizes.parameters
        return replace(sizes, edge_parameters=edge)._with_formats(cell)

    def _with_formats(self, cell: CellSpec) -> "Sizes":
        """Add the bytes of numbers: sharded masters are in float32 except under O3, whole ones extra."""
        plan = cell.precision.plan()
        param, compute = BYTES[plan.param_dtype], plan.autocast_dtype or plan.param_dtype
        moments = 2 if cell.optimizer.name.startswith("adam") else 1
        masters = 4 if plan.master_weights else 0
        held = 2 if param == 2 and not masters else 4
        own = held if self.sharded else param
        return replace(
            self,
            compute="float8_e4m3fn" if cell.precision.float8 else compute,
            stream=param,
            inner=BYTES[compute],
            parameter=own,
            gradient=own,
            optimizer=moments * held if self.sharded else moments * (masters or param) + masters,
            gathered=param,
            exchanged=held,
        )

    @property
    def parameters(self) -> int:
        """Of the whole model: in each block four matrices, their biases and two norms."""
        d, m = self.width, self.mlp_width
        return self.depth * (4 * d * d + 2 * d * m + 9 * d + m) + self.edge_parameters

    @property
    def rank_blocks(self) -> int:
        """Blocks of the fullest rank."""
        return ceil(self.depth / self.mesh.pipeline)

    @property
    def rank_edge(self) -> float:
        """Parameters of a rank outside its blocks; the stages at either end of a pipeline share them."""
        return self.edge_parameters / (2 if self.mesh.pipeline > 1 else 1)

    @property
    def rank_parameters(self) -> float:
        """Parameters of one rank before they are sharded: its blocks, split by tensor, and one edge."""
        d, m = self.width, self.mlp_width
        split = (4 * d * d + 2 * d * m + 3 * d + m) / self.mesh.tensor
        return self.rank_blocks * (split + 6 * d) + self.rank_edge

    @property
    def rank_unit(self) -> float:
        """Parameters of one of its blocks."""
        return (self.rank_parameters - self.rank_edge) / self.rank_blocks

    @property
    def rank_tokens(self) -> int:
        """Tokens of a rank in one micro-batch, padding included."""
        return self.micro_batch * ceil(self.tokens / self.mesh.sequence_parallel_size)


def memory(s: Sizes) -> MemoryParts:
    """Return the bytes of one rank; the peak is that of the backward pass of the first micro-batch."""
    shards = s.mesh.state_shards if s.sharded else 1
    parameters, blocks, unit = s.rank_parameters, s.rank_blocks, s.rank_unit
    in_flight, is_stage = min(s.micro_batches, s.mesh.pipeline), s.mesh.pipeline > 1
    accumulates = s.sharded and s.micro_batches > 1
    d, m, t = s.width, s.mlp_width, s.mesh.tensor
    # what the block at work needs besides what is kept
    working = s.rank_tokens * (2 * d * s.stream + s.inner * (2 * m / t + 3 * d / t))
    if s.recompute != "none":
        working += _kept(replace(s, recompute="none"))
    held = {
        "parameters": s.parameter * parameters / shards,
        "gradients": s.gradient * parameters / shards,
        "optimizer": s.optimizer * parameters / shards,
        "activations": in_flight * blocks * _kept(s) + working,
        "gathered": s.sharded * (parameters if is_stage else 2 * unit + s.rank_edge) * s.gathered
        + s.sharded * s.exchanged * (parameters if accumulates else unit),
        "buffers": _waiting(s),
    }  # fmt: skip
    if s.stream > s.inner:
        held["activations"] += s.inner * parameters  # autocast keeps its copies until backward
    whole = {part: round(value) for part, value in held.items()}
    return MemoryParts(**whole, peak=sum(whole.values()))


def _waiting(s: Sizes) -> float:
    """Bytes that the first stage of a pipeline holds throughout a step; 0 without a pipeline.

    The images of all micro-batches, and for each of them what was sent and a buffer that receives its
    gradient, as traces of `torch.distributed.pipelining` show.
    """
    if s.mesh.pipeline == 1:
        return 0.0
    rows, _, inputs = s.edge_products[0]
    images = 4 * s.micro_batch * rows * inputs
    sent = s.rank_tokens * s.width * s.stream
    return s.micro_batches * (images + 2 * sent)


def _kept(s: Sizes) -> float:
    """Bytes of activations of one block that one micro-batch keeps for the backward pass."""
    tokens, d, m, t = s.rank_tokens, s.width, s.mlp_width, s.mesh.tensor
    if s.recompute == "blocks":
        return tokens * d * s.stream
    norms = 0 if s.recompute == "selected" else 2 * d
    hidden = m / t if s.recompute == "selected" else 2 * m / t
    inner = norms + 4 * d / t + hidden
    stream = 2 * d * s.stream
    scores = 0.0
    if not s.fused_attention:
        scores = 2.5 * s.heads / t * s.tokens  # scores, softmax, dropout's mask
    return tokens * (stream + s.inner * (inner + scores) + 16 + 4 * s.heads / t)
