"""Masked autoencoders: proved on ranks, faults found, choices refused, FLOPs counted."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cells import entry
from tests.objectives.verdicts import asked, verdicts
from tests.training.alone import batch
from vitsweep.model.build import build_model
from vitsweep.model.flops import blocks_flops
from vitsweep.objectives.base import Batch, Step
from vitsweep.objectives.counted import counted
from vitsweep.objectives.masked_autoencoder import MaskedAutoencoder
from vitsweep.objectives.masked_patches import MaskedPatches
from vitsweep.objectives.positions import grid_positions
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.technique import SOFTMAX

MAE = "objective=masked_autoencoder"
SMALL = ("objective.decoder_depth=1", "objective.decoder_width=32", "objective.decoder_heads=4")


@dataclass(frozen=True, kw_only=True)
class MasksOfOthers(MaskedAutoencoder):
    """The last rank's images are masked as those of the first."""

    def open(self, cell: CellSpec) -> MaskedPatches:
        return _MasksOfOthers(cell)


class _MasksOfOthers(MaskedPatches):
    def prepare(self, batch: Batch, step: Step) -> Batch:
        return super().prepare(batch, replace(step, first=0))


def with_fault(spec: CellSpec, kind: type[Any]) -> CellSpec:
    return replace(spec, objective=kind(**vars(spec.objective)))


def test_it_is_proved_on_ranks_and_a_mask_of_another_image_is_found(tmp_path: Path) -> None:
    honest = asked(MAE, *SMALL, "precision=O1", "sharding=fsdp", "batch.accumulation_steps=2")
    plain = asked(MAE, *SMALL, "sharding=ddp")
    proved, wrong = verdicts([honest, with_fault(plain, MasksOfOthers)], tmp_path)
    assert proved == "equal"
    assert "loss" in wrong
    assert "in the forward pass" in wrong


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=O2", "sharding=fsdp", "layout=batch_second"),
        ("precision=O3", "sharding=zero2", "classifier=pooled", "memory=recompute_blocks"),
        ("precision=bf16", "tensor_parallel=megatron", "mesh.tensor=2"),
        ("precision=fp32", "sharding=zero1", "layout.patch_embedding=linear", "model.registers=2"),
    ],
)
def test_it_is_proved_with_other_techniques(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert verdicts([asked(MAE, *SMALL, *overrides)], tmp_path) == ["equal"]


def test_held_out_images_have_the_same_masks_in_each_evaluation() -> None:
    spec = asked(MAE, *SMALL, "sharding=none", ranks=1)
    objective = spec.objective.open(spec)
    images = {"image": batch()[0]}
    at = Step(seed=0, number=1, total=9, first=0, num_images=8, device=torch.device("cpu"))
    held_out = [replace(at, number=n, of_held_out=True) for n in (1, 2)]
    first, second = (objective.prepare(images, step)["order"] for step in held_out)
    assert torch.equal(first, second)
    trained = objective.prepare(images, at)["order"]
    assert not torch.equal(trained, objective.prepare(images, replace(at, number=2))["order"])
    assert torch.equal(trained.sort(1).values, torch.arange(16).expand(8, -1))


def test_tokens_and_flops_are_those_of_encoder_and_decoder() -> None:
    spec = asked(MAE, *SMALL, "sharding=none", ranks=1)
    assert [each.tokens for each in spec.objective.passes(spec)] == [5, 17]
    encoder, patches = spec.transformer, 2 * 16 * 4 * 32
    assert isinstance(encoder, ViTSpec)
    kept, decoder = replace(encoder, kept_patches=4), spec.objective.decoder(encoder)
    blocks = sum(blocks_flops(shape, 8, "token", SOFTMAX) for shape in (kept, decoder))
    linears = 2 * 5 * 32 * 32 + 2 * 16 * 32 * 4
    flops, parameters = counted(spec)
    assert flops == 3 * (blocks + linears) + 2 * patches
    assert parameters == sum(p.numel() for p in build_model(spec).parameters())


def test_positions_are_those_of_the_source() -> None:
    """As `get_2d_sincos_pos_embed` of mae (util/pos_embed.py), from its formula."""
    found = grid_positions(3, 3, 8, torch.device("cpu"))
    column, row = 2.0, 1.0
    angles = [column, column / 100, row, row / 100]
    a, b, c, d = torch.tensor(angles).double()
    expected = torch.stack([a.sin(), b.sin(), a.cos(), b.cos(), c.sin(), d.sin(), c.cos(), d.cos()])
    assert torch.allclose(found[5], expected)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model=video_vit_nano", "data=moving_digits"), "`model=video_vit_nano`"),
        (("tokens=drop",), "`tokens=drop`"),
        (("vit_block=parallel",), "`vit_block=parallel`"),
        (("sequence_parallel=ulysses",), "`sequence_parallel=ulysses`"),
        (("pipeline_parallel=gpipe",), "`pipeline_parallel=gpipe`"),
        (("objective.decoder_width=34",), "`objective.decoder_width=34`"),
        (("objective.kept_share=0.01",), "`objective.kept_share=0.01`"),
        (("model.patch_px=1",), "`model.patch_px=1`"),
        (("tensor_parallel=megatron", "objective.decoder_heads=1"), "`objective.decoder_heads=1`"),
        (("task=train", "task.target_accuracy=0.9"), "`task.target_accuracy=0.9`"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(overrides: tuple[str, ...], named: str) -> None:
    found = entry(MAE, *SMALL, "resources.ranks_per_node=2", *overrides).reasons
    assert any(named in reason for reason in found), found
