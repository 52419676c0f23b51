"""The closed formulas of a rank's memory equal the sum over a list of the tensors that they stand for."""

from dataclasses import replace
from math import ceil

import pytest
import torch
from torch import nn

from tests.cells import entry
from vitsweep.planning.closed_memory import MemoryParts, Sizes, memory
from vitsweep.spec.resources import MeshShape

DEGREES = ("pipeline", "replicate", "shard", "sequence", "ring", "ulysses", "tensor")


def mesh(**degrees: int) -> MeshShape:
    return MeshShape(**(dict.fromkeys(DEGREES, 1) | degrees))


D, HEADS, M, TOKENS, IMAGES, EDGE, PIXELS = 24, 3, 80, 10, 5, 1001, 48

BASE = Sizes(
    depth=6, width=D, heads=HEADS, mlp_width=M, tokens=TOKENS, edge_parameters=EDGE,
    edge_products=((TOKENS - 1, D, PIXELS), (1, 7, D)), mesh=mesh(), ranks_per_node=8,
    micro_batch=IMAGES,
)  # fmt: skip
"""bfloat16 autocast over float32 parameters."""


class Block(nn.Module):
    """A pre-norm block whose matrices a rank has a part of."""

    def __init__(self, tensor: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.columns = nn.ModuleList([nn.Linear(D, 3 * D // tensor), nn.Linear(D, M // tensor)])
        self.rows = nn.ModuleList(
            [nn.Linear(D // tensor, D, bias=True), nn.Linear(M // tensor, D, bias=True)]
        )


def block_parameters(tensor: int = 1) -> int:
    return sum(p.numel() for p in Block(tensor).parameters())


def kept(s: Sizes, recompute: str) -> float:
    """Bytes of the tensors that autograd keeps of one block, for each token."""
    t, stream, inner = s.mesh.tensor, s.stream, s.inner
    block_input = D * stream
    if recompute == "blocks":
        return block_input
    norms = [] if recompute == "selected" else [D * inner, D * inner]
    hidden = [M / t * inner] * (1 if recompute == "selected" else 2)  # before and after GELU
    qkvo = [D / t * inner] * 4
    scores = (
        []
        if s.fused_attention
        else [HEADS / t * s.tokens * inner] * 2 + [HEADS / t * s.tokens * inner / 2]
    )
    statistics = [4] * 4 + [4 * HEADS / t]  # mean and deviation of two norms; logsumexp
    return sum([block_input, D * stream, *norms, *hidden, *qkvo, *scores, *statistics])


def expected(s: Sizes) -> MemoryParts:
    mesh, t = s.mesh, s.mesh.tensor
    stages = mesh.pipeline
    blocks = ceil(s.depth / stages)
    edge = EDGE if stages == 1 else EDGE / 2
    unit = block_parameters(t)
    whole = blocks * unit + edge
    shards = mesh.state_shards if s.sharded else 1
    tokens = s.micro_batch * ceil(s.tokens / mesh.sequence_parallel_size)
    at_work = 2 * D * s.stream + (2 * M + 3 * D) / t * s.inner
    if s.recompute != "none":
        at_work += kept(s, "none")
    activations = tokens * (min(s.micro_batches, stages) * blocks * kept(s, s.recompute) + at_work)
    if s.stream == 4 and s.inner == 2:
        activations += 2 * whole  # autocast's copies
    gathered = 0.0
    if s.sharded:
        params = whole if stages > 1 else unit + unit + edge
        grads = whole if s.micro_batches > 1 else unit
        gathered = params * s.gathered + grads * s.exchanged
    waiting = 0.0
    if stages > 1:
        images = s.micro_batch * (TOKENS - 1) * PIXELS * 4
        waiting = s.micro_batches * (images + tokens * D * s.stream + tokens * D * s.stream)
    parts = {
        "parameters": s.parameter * whole / shards,
        "gradients": s.gradient * whole / shards,
        "optimizer": s.optimizer * whole / shards,
        "activations": activations,
        "gathered": gathered,
        "buffers": waiting,
    }
    rounded = {name: round(value) for name, value in parts.items()}
    return MemoryParts(**rounded, peak=sum(rounded.values()))


def test_the_parts_are_the_sums_of_their_tensors() -> None:
    variants = [
        {},
        {"recompute": "selected"},
        {"recompute": "blocks", "stream": 2},
        {"fused_attention": False, "inner": 4},
        {"mesh": mesh(tensor=2, replicate=2), "parameter": 2, "gradient": 3, "optimizer": 12},
        {"mesh": mesh(shard=4), "sharded": True, "exchanged": 2},
        {"mesh": mesh(shard=4), "sharded": True, "micro_batches": 3, "gathered": 2},
        {"mesh": mesh(ulysses=3), "recompute": "selected"},
        {"mesh": mesh(pipeline=4), "micro_batches": 3},
        {"mesh": mesh(pipeline=2, shard=2), "micro_batches": 8, "sharded": True, "stream": 2},
    ]
    for changes in variants:
        sizes = replace(BASE, **changes)  # type: ignore[arg-type]
        assert memory(sizes) == expected(sizes)
        assert sizes.parameters == 6 * block_parameters() + EDGE


def test_bytes_of_numbers_are_those_of_what_a_rank_holds() -> None:
    """Per parameter: held, gradient, moments with masters, gathered, exchanged; stream and inside."""
    small = ("model=vit_nano", "data=synthetic", "resources.ranks_per_node=2")
    for choices, bytes_ in {
        "precision=fp32 sharding=ddp optimizer=adamw_fused": (4, 4, 8, 4, 4, 4, 4),
        "precision=bf16 sharding=ddp optimizer=adamw_fused": (4, 4, 8, 4, 4, 4, 2),
        "precision=O2 sharding=ddp optimizer=adamw_fused": (2, 2, 12, 2, 4, 2, 2),
        "precision=O2 sharding=fsdp optimizer=adamw_fused": (4, 4, 8, 2, 4, 2, 2),
        "precision=O3 sharding=fsdp optimizer=adamw_fused": (2, 2, 4, 2, 2, 2, 2),
        "precision=fp32 sharding=ddp optimizer=sgd_foreach recipe=none": (4, 4, 4, 4, 4, 4, 4),
    }.items():
        s = Sizes.of(entry(*small, *choices.split()).spec)
        found = (s.parameter, s.gradient, s.optimizer, s.gathered, s.exchanged, s.stream, s.inner)
        assert found == bytes_
        assert s.sharded == ("fsdp" in choices)
        assert (
            s.update
            == {"adamw_fused": "fused", "sgd_foreach": "foreach"}[
                choices.split("optimizer=")[1].split()[0]
            ]
        )


@pytest.mark.parametrize("pooling", ["token", "pooled"])
def test_parameters_and_tokens_are_those_of_the_model(pooling: str) -> None:
    from vitsweep.model.build import build_model

    for model in ("vit_nano", "vit_tiny"):
        cell = entry(f"model={model}", "data=synthetic", f"classifier={pooling}").spec
        sizes = Sizes.of(cell)
        with torch.device("meta"):
            built = build_model(cell)
        assert sizes.parameters == sum(p.numel() for p in built.parameters())
        assert sizes.edge_products[0][1:] == built.embedding.patch.weight.flatten(1).shape
