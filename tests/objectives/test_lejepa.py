"""LeJEPA: proved on ranks, faults found, formulas and crops against their sources."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cells import entry
from tests.data.cells_and_worlds import world as lone_world
from tests.objectives.test_masked_autoencoder import with_fault
from tests.objectives.verdicts import asked, verdicts
from tests.training.alone import batch
from vitsweep.objectives.base import Step
from vitsweep.objectives.lejepa import LeJepa
from vitsweep.objectives.sigreg import OpenLeJepa
from vitsweep.objectives.views import cubic_weights
from vitsweep.proof.checks import Bounds
from vitsweep.proof.evidence import Reference, TrainedTwin
from vitsweep.proof.faults import minus, norms_of, typical_norm
from vitsweep.proof.reference import RoundingNoise
from vitsweep.proof.twin import STEPS, global_batch, twin_of
from vitsweep.spec.cell_spec import CellSpec

LEJEPA = "objective=lejepa"
SMALL = ("objective.projector_width=32", "objective.directions=8", "objective.small_views=3")
AT = Step(seed=0, number=1, total=None, first=0, num_images=8, device=torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class WithinARank(LeJepa):
    """Statistics of the images of each replica."""

    def open(self, cell: CellSpec) -> OpenLeJepa:
        return _WithinARank(cell)


class _WithinARank(OpenLeJepa):
    def sigreg(self, z_BVK: Tensor, step: Step) -> Tensor:
        return super().sigreg(z_BVK, replace(step, world=None))


@dataclass(frozen=True, kw_only=True)
class DirectionsOfARank(LeJepa):
    """Each replica draws directions of its own."""

    def open(self, cell: CellSpec) -> OpenLeJepa:
        return _DirectionsOfARank(cell)


class _DirectionsOfARank(OpenLeJepa):
    def directions(self, like: Tensor, step: Step) -> Tensor:
        return super().directions(like, replace(step, number=step.number + 100 * step.first))


def test_it_is_proved_on_ranks_and_planted_faults_are_found(tmp_path: Path) -> None:
    honest = asked(LEJEPA, *SMALL, "precision=O1", "sharding=fsdp")
    plain = asked(LEJEPA, *SMALL, "sharding=ddp")
    proved, wrong = verdicts([honest, with_fault(plain, WithinARank)], tmp_path)
    assert proved == "equal"
    assert "loss" in wrong
    assert "in the forward pass" in wrong


@pytest.mark.slow
def test_what_rounding_does_to_the_distances_of_views_is_within_its_bounds() -> None:
    """Its effect on gradients has few directions: half of these were outside of what one draw of it gave."""
    spec = asked(LEJEPA, *SMALL, "precision=bf16", "sharding=none", ranks=1)
    twin, world, outside = twin_of(spec), lone_world(), list[int]()
    bounds, trained = Bounds(twin, world), TrainedTwin(twin, world)
    reference, found = Reference(twin, world, in_parts=False), trained.now()
    for step in range(STEPS):
        batch, at = global_batch(twin, step, world), (found.read, found.buffers)
        found = trained.step(batch, step, found.weights)
        expected = reference.step(*at, batch, found)
        typical = typical_norm(norms_of(expected.gradients))
        noise = {name: size / typical for name, size in expected.noise.items()}
        allowed = bounds.gradients(expected.gradients, noise)
        for seed in range(100, 104):
            with RoundingNoise(seed):
                other = reference.plain.step(*at, batch, step).gradients
            apart = norms_of(minus(other, expected.gradients))
            outside.append(any(apart[name] > allowed[name] for name in apart))
    assert sum(outside) <= 1


@pytest.mark.full
def test_directions_that_differ_between_ranks_are_found(tmp_path: Path) -> None:
    plain = asked(LEJEPA, *SMALL, "sharding=ddp")
    [wrong] = verdicts([with_fault(plain, DirectionsOfARank)], tmp_path)
    assert "in the forward pass" in wrong


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=O2", "sharding=fsdp", "layout=batch_second"),
        ("precision=O3", "sharding=zero2", "classifier=pooled", "memory=recompute_blocks"),
        ("precision=fp32", "sharding=zero1", "layout.patch_embedding=linear", "model.registers=2"),
        ("precision=O1", "compilation=compile_blocks", "objective.small_views=0"),
    ],
)
def test_it_is_proved_with_other_techniques(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert verdicts([asked(LEJEPA, *SMALL, *overrides)], tmp_path) == ["equal"]


def opened(*overrides: str) -> OpenLeJepa:
    spec = asked(LEJEPA, *SMALL, "sharding=none", *overrides, ranks=1)
    found = spec.objective.open(spec)
    assert isinstance(found, OpenLeJepa)
    return found


def test_sigreg_is_that_of_the_source() -> None:
    """As `SIGReg` of LeJEPA's MINIMAL.md computes it, from its formula."""
    objective, z = opened(), torch.randn(8, 5, 16)
    t = torch.linspace(0, 3, 17)
    window = (-t.square() / 2).exp()
    weights = torch.full((17,), 2 * 3 / 16)
    weights[[0, -1]] = 3 / 16
    projected = (z.transpose(0, 1) @ objective.directions(z, AT)).unsqueeze(-1) * t
    apart = (projected.cos().mean(-3) - window).square() + projected.sin().mean(-3).square()
    expected = ((apart @ (weights * window)) * 8).mean()
    assert torch.allclose(objective.sigreg(z, AT), expected, rtol=1e-5)


class Products(TorchDispatchMode):
    """Notes the dtypes in which matrix products are computed: a GPU may do those of float32 in TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def test_no_product_of_the_loss_is_in_tf32() -> None:
    with Products() as found:
        opened().loss(torch.randn(8, 5, 16, requires_grad=True), {}, AT).backward()
    assert found.dtypes == {torch.float64}


def test_crops_lie_in_the_image_as_torch_would_sample_them() -> None:
    objective = opened("objective.flips=false")
    images = batch()[0].double()
    drawn = AT.uniform("large crops", 8, 2, 5).double()
    found = objective.prepare({"image": images}, AT)["large"]
    area, ratio = (
        0.3 + 0.7 * drawn[..., 0],
        ((2 * drawn[..., 1] - 1) * torch.tensor(4 / 3).log()).exp(),
    )
    width, height = ((area * r).sqrt().clamp(max=1) for r in (ratio, 1 / ratio))
    for view in range(2):
        transform = torch.zeros(8, 2, 3, dtype=torch.float64)
        for axis, size in enumerate((width[:, view], height[:, view])):
            start = drawn[:, view, 2 + axis] * (1 - size)
            transform[:, axis, axis] = size
            transform[:, axis, 2] = 2 * start + size - 1
        grid = F.affine_grid(transform, [8, 1, 8, 8], align_corners=False)
        expected = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        assert torch.allclose(found[:, view].double(), expected, atol=1e-5)


def test_positions_by_the_formula_of_the_cubic_are_those_of_torch() -> None:
    whole = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for side in (2, 3, 5, 8):
        along = cubic_weights(side, 5)
        found = torch.einsum("aw,bh,dwh->dab", along, along, whole)
        expected = F.interpolate(whole[None], size=(side, side), mode="bicubic")[0]
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_crops_belong_to_an_image_whoever_draws_them() -> None:
    objective, images = opened(), batch()[0]
    whole = objective.prepare({"image": images}, AT)
    part = objective.prepare({"image": images[2:4]}, replace(AT, first=2))
    assert whole["small"].shape == (8, 3, 1, 4, 4)
    for name in ("large", "small"):
        assert torch.equal(whole[name][2:4], part[name])


def test_tokens_are_those_of_all_views() -> None:
    spec = asked(LEJEPA, *SMALL, "sharding=none", ranks=1)
    assert spec.objective.tokens_per_image(spec) == 2 * 17 + 3 * 5


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("batch.accumulation_steps=2",), "`batch.accumulation_steps=2`"),
        (("objective.least_area=0.5",), "`objective.least_area=0.5`"),
        (("pipeline_parallel=gpipe",), "`pipeline_parallel=gpipe`"),
        (("tensor_parallel=megatron", "precision=O1"), "`tensor_parallel=megatron`"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(overrides: tuple[str, ...], named: str) -> None:
    found = entry(LEJEPA, *SMALL, "resources.ranks_per_node=2", *overrides).reasons
    assert any(named in reason for reason in found), found
