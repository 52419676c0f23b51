"""A network of two stacks whose blocks read a context trains as in one process under every technique."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.equivalence import STEPS, train_plain
from tests.techniques.sequence_parallel.cases import AXIAL, answers, cell
from vitsweep.collectives.parallel_linear import Boundary, copy_to_tensor_parallel
from vitsweep.model.attention import Attention, TokenAxis
from vitsweep.model.block import Block, Context, Network, Stack
from vitsweep.model.initialize import Draws
from vitsweep.model.vit import ALONG_X, ALONG_Y, GridEmbedding
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, mean_over_replicas, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.training.shards import whole_tensors
from vitsweep.world import World

NARROW = 16


class FoldedAttention(Attention):
    """Self-attention along one axis of (B, X, Y, D), whose queries and keys know their place along X."""

    def __init__(self, width: int, num_heads: int, axis: int) -> None:
        super().__init__(width, num_heads, batch_first=True)
        self.axis = axis

    def forward(self, x: Tensor, places_XK: Tensor | None = None) -> Tensor:
        q, k, v = (p.unflatten(-1, (-1, self.head_width)) for p in self.qkv(x).chunk(3, dim=-1))
        if places_XK is not None:
            q, k = (each + places_XK[:, None, None] for each in (q, k))
        if self.axis == ALONG_X:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        folded = (each.flatten(0, 1).transpose(1, 2) for each in (q, k, v))
        o = self.attend(*folded).transpose(1, 2).unflatten(0, q.shape[:2])
        return self.out((o.transpose(1, 2) if self.axis == ALONG_X else o).flatten(-2))


class ModulatedBlock(Block):
    """A block whose attention reads scaled and shifted tokens, as that of a diffusion transformer."""

    boundary: Boundary | None = None
    sums_gradients = True

    def __init__(self, spec: Any, axis: int) -> None:
        super().__init__(spec, batch_first=True)
        self.axis = axis
        self.norm_attention = nn.LayerNorm(spec.width, elementwise_affine=False)
        self.attention = FoldedAttention(spec.width, spec.num_heads, axis)

    def split(self, boundary: Boundary) -> None:
        super().split(boundary)
        self.boundary = boundary

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None
        modulation, places = context["modulation"], context.get("places")
        if self.boundary and self.sums_gradients:
            modulation = self.boundary.beside_tokens(modulation)
            if places is not None:  # which meet a rank's heads alone
                places = copy_to_tensor_parallel(places, self.boundary.group)
        scale, shift = modulation[:, None, None].chunk(2, dim=-1)
        normed = self.norm_attention(x) * (1 + scale) + shift
        x = x + self.attention(normed, places if self.axis == ALONG_X else None)
        return x + self.mlp_branch(self.norm_mlp(x))


class TwoStacks(Network):
    """An encoder whose attention along X knows places, and a narrower decoder."""

    def __init__(self, spec: Any, resolution_px: int) -> None:
        super().__init__()
        narrow = replace(spec, width=NARROW, num_heads=2, mlp_width=2 * NARROW)
        x, y = spec.grid(resolution_px)
        axes = (TokenAxis(ALONG_X, x), TokenAxis(ALONG_Y, y))
        self.embedding = GridEmbedding(spec, resolution_px)
        self.condition = nn.Linear(spec.in_channels, 2 * spec.width)
        self.places = nn.Parameter(torch.randn(x, spec.width // spec.num_heads))
        norm, decoder_norm = nn.LayerNorm(spec.width), nn.LayerNorm(NARROW)
        self.blocks = Stack(
            (ModulatedBlock(spec, axis) for axis in (ALONG_Y, ALONG_X, ALONG_Y)),
            norm=norm,
            axes=axes,
            positions={"places": TokenAxis(0, x)},
        )
        self.norm = norm
        self.bridge = nn.Linear(spec.width, NARROW)
        self.decoder_condition = nn.Linear(2 * spec.width, 2 * NARROW)
        self.decoder_blocks = Stack(
            (ModulatedBlock(narrow, axis) for axis in (ALONG_X, ALONG_Y)),
            norm=decoder_norm,
            axes=axes,
        )
        self.decoder_norm = decoder_norm
        self.head = nn.Linear(NARROW, spec.num_classes)
        nn.init.normal_(self.embedding.position_x)
        nn.init.normal_(self.embedding.position_y)

    def enter(self, inputs: Tensor) -> tuple[Tensor, Context | None]:
        modulation = self.condition(inputs.mean(dim=(-2, -1)))
        return self.embedding(inputs), {"modulation": modulation, "places": self.places}

    def forward(self, inputs: Tensor) -> Tensor:
        x, context = self.enter(inputs)
        assert context is not None
        x = self.norm(self.blocks(x, context))
        x = self.bridge(x + x.flip(ALONG_X))  # tokens of other ranks
        context = {"modulation": self.decoder_condition(context["modulation"])}
        x = self.decoder_norm(self.decoder_blocks(x, context))
        return self.head(x.square().mean(dim=(ALONG_X, ALONG_Y)))


def network(cell: CellSpec) -> TwoStacks:
    torch.manual_seed(cell.seed)
    return TwoStacks(cell.model, cell.batch.resolution_px)


def differences(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    found = []
    for each in cells:
        batches = [global_batch(each, step, world) for step in range(STEPS)]
        trainer = parallelize(network(each), each, world)
        losses = [
            mean_over_replicas(trainer.step(iter(my_share(each, batch, world))), world)
            for batch in batches
        ]
        weights = whole_tensors(trainer, lambda p: p)
        plain: Any = each.attention.plain_twin(network(each))
        vars(plain)["draws"] = Draws(each.seed)
        first = {name: p.detach().clone().double() for name, p in plain.named_parameters()}
        wanted = train_plain(plain, each, batches)
        named = dict(plain.named_parameters())
        apart = {n: weights[n].detach().reshape(-1) - named[n].detach().reshape(-1) for n in named}
        moved = {n: named[n].detach() - first[n] for n in named}
        found.append(
            {
                "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
                "weights": max(float(d.abs().max()) for d in apart.values()),
                "least moved": min(float(d.abs().max()) for d in moved.values()),
            }
        )
    dist.barrier()
    return found


def without_sums(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    ModulatedBlock.sums_gradients = False
    return differences(world, cells)


CASES = [
    ("sharding=fsdp",),
    ("sharding=fsdp", "sharding.blocks_per_unit=2", "memory=recompute_blocks"),
    ("sharding=ddp", "memory=recompute_selected"),
    ("sequence_parallel=ulysses", "memory=recompute_blocks"),
    ("sequence_parallel=ring", "sequence_parallel.order=zigzag", "attention=sdpa_causal"),
    ("sequence_parallel=lss",),
    ("sequence_parallel=dsp",),
    ("sequence_parallel=dsp", "sharding=fsdp", "memory=recompute_blocks"),
    ("tensor_parallel=megatron",),
    ("sequence_parallel=megatron_sp", "memory=recompute_blocks"),
]


@pytest.mark.slow
def test_two_stacks_on_two_ranks_train_as_in_one_process(tmp_path: Path) -> None:
    cells = [cell(2, *AXIAL, *case) for case in CASES]
    for name, found in answers(differences, cells, tmp_path):
        assert found["loss"] < 1e-12, (name, found)
        assert found["weights"] < 1e-12, (name, found)
        assert found["least moved"] > 1e-6, (name, found)


@pytest.mark.full
def test_compiled_blocks_of_two_stacks_train_as_others(tmp_path: Path) -> None:
    cells = [cell(2, *AXIAL, "sharding=fsdp", "compilation=compile_blocks")]
    [(name, found)] = answers(differences, cells, tmp_path)
    assert found["loss"] < 1e-12, (name, found)
    assert found["weights"] < 1e-12, (name, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor_parallel=megatron", "sequence_parallel=megatron_sp"])
def test_gradients_of_a_context_that_are_not_summed_are_found(case: str, tmp_path: Path) -> None:
    [(_, found)] = answers(without_sums, [cell(2, *AXIAL, case)], tmp_path)
    assert found["weights"] > 1e-6


@dataclass(frozen=True, kw_only=True)
class Conditioned(ViTSpec):
    """A ViT whose blocks read a context."""

    has_context: ClassVar[bool] = True


def test_what_hands_tokens_alone_to_blocks_with_a_context_is_refused() -> None:
    plain = cell(2, "vit_block=parallel", "tokens=registers", "pipeline_parallel=gpipe")
    told = Conditioned(**vars(plain.model)).refused(plain)
    assert [*told] == ["vit_block", "tokens", "pipeline_parallel"]
    assert told["tokens"].startswith("`tokens=registers` ")
    assert told["tokens"].endswith("`model=vit_nano` read a context besides: use `tokens=all`.")
    assert not plain.model.refused(plain)
    assert not Conditioned(**vars(plain.model)).refused(cell(1, "sharding=none"))
