"""Self-distillation: proved on ranks, faults found, its losses by their formulas, resumed bit for bit."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.cells import entry
from tests.objectives.test_lejepa import Products
from tests.objectives.test_masked_autoencoder import with_fault
from tests.objectives.verdicts import asked, verdicts
from tests.training.alone import batch, trainer_of
from tests.training.test_checkpoint import assert_same, interrupted
from vitsweep.objectives.base import Batch, Step, at_least_float32
from vitsweep.objectives.prototypes import OpenDistillation, Outputs
from vitsweep.objectives.self_distillation import SelfDistillation
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.averaging.ema import MovingAverage
from vitsweep.training.trainer import Trainer

DINO = "objective=self_distillation"
SMALL = (
    "objective.prototypes=16",
    "objective.head_width=32",
    "objective.bottleneck=16",
    "objective.small_views=2",
)
AT = Step(seed=0, number=1, total=None, first=0, num_images=8, device=torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class SinkhornOfARank(SelfDistillation):
    """Shares are made equally frequent over each replica's images."""

    def open(self, cell: CellSpec) -> OpenDistillation:
        return _SinkhornOfARank(cell)


class _SinkhornOfARank(OpenDistillation):
    def shares(self, logits: Tensor, step: Step, counted: Tensor | None = None) -> Tensor:
        return super().shares(logits, replace(step, world=None), counted)


@dataclass(frozen=True, kw_only=True)
class KoLeoOfARank(SelfDistillation):
    """The nearest image is one of the same replica."""

    def open(self, cell: CellSpec) -> OpenDistillation:
        return _KoLeoOfARank(cell)


class _KoLeoOfARank(OpenDistillation):
    def koleo(self, z_BD: Tensor, step: Step) -> Tensor:
        return super().koleo(z_BD, replace(step, world=None))


def nothing() -> None:
    """Leave all as it is."""


def never_reshard() -> None:
    """Leave what a teacher's pass gathered: the student reads it."""
    Trainer.reshard = lambda self: None  # type: ignore[method-assign]


def one_step_late() -> None:
    """Let the teacher follow the weights from before the step."""
    update = MovingAverage.update

    def late(self: MovingAverage, step: int, total: int | None = None) -> None:
        now = [weight.clone() for weight in self._weights]
        before = vars(self).get("before", self.averages)
        torch._foreach_copy_(self._weights, before)
        update(self, step, total)
        torch._foreach_copy_(self._weights, now)
        vars(self)["before"] = now

    MovingAverage.update = late  # type: ignore[method-assign]


def momentum_twice() -> None:
    """Let the average follow twice in a step."""
    update = MovingAverage.update

    def twice(self: MovingAverage, step: int, total: int | None = None) -> None:
        update(self, step, total)
        update(self, step, total)

    MovingAverage.update = twice  # type: ignore[method-assign]


def test_it_is_proved_on_ranks_and_faults_of_its_losses_are_found(tmp_path: Path) -> None:
    honest = asked(DINO, *SMALL, "precision=O2", "sharding=fsdp")
    plain = asked(DINO, *SMALL, "sharding=ddp")
    proved, wrong = verdicts([honest, with_fault(plain, SinkhornOfARank)], tmp_path)
    assert proved == "equal"
    assert "loss" in wrong
    assert "in the forward pass" in wrong


@pytest.mark.full
def test_neighbours_of_the_same_rank_are_found(tmp_path: Path) -> None:
    [wrong] = verdicts([with_fault(asked(DINO, *SMALL, "sharding=ddp"), KoLeoOfARank)], tmp_path)
    assert "loss" in wrong
    assert "in the forward pass" in wrong


@pytest.mark.parametrize(
    ("sharding", "plant"),
    [
        ("fsdp", never_reshard),
        pytest.param("ddp", one_step_late, marks=pytest.mark.full),
        pytest.param("ddp", momentum_twice, marks=pytest.mark.full),
    ],
)
def test_a_wrong_teacher_is_found(sharding: str, plant: object, tmp_path: Path) -> None:
    [told] = verdicts([asked(DINO, *SMALL, f"sharding={sharding}")], tmp_path, [plant])
    assert "loss" in told


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ("precision=O1", "sharding=fsdp", "layout=batch_second"),
        ("precision=O3", "sharding=zero2", "classifier=pooled", "memory=recompute_blocks"),
        ("precision=bf16", "sharding=ddp", "seed=3"),
        ("precision=fp32", "sharding=zero1", "layout.patch_embedding=linear", "model.registers=2"),
        ("precision=O1", "compilation=compile_blocks", "objective.small_views=0"),
        ("precision=O2", "sharding=ddp", "objective.sinkhorn_iterations=0"),
    ],
)
def test_it_is_proved_with_other_techniques(overrides: tuple[str, ...], tmp_path: Path) -> None:
    assert verdicts([asked(DINO, *SMALL, *overrides)], tmp_path) == ["equal"]


def opened(*overrides: str) -> OpenDistillation:
    spec = asked(DINO, *SMALL, "sharding=none", *overrides, ranks=1)
    found = spec.objective.open(spec)
    assert isinstance(found, OpenDistillation)
    return found


def test_one_of_two_large_views_is_masked_by_a_share_of_its_patches() -> None:
    found = opened().prepare({"image": batch(images=8)[0]}, AT)
    hidden, weights = found["hidden"], found["weights"]
    assert hidden.shape == (8, 2, 16)
    numbers = hidden.sum(2)
    assert bool((numbers.min(1).values == 0).all())
    assert numbers.max(1).values.tolist() == (weights > 0).sum(1).tolist()
    assert bool(((numbers.max(1).values >= 1) & (numbers.max(1).values <= 8)).all())
    assert torch.allclose(weights.sum(1), torch.ones(8).double())
    for image in range(8):
        own = found["masked"][image][weights[image] > 0]
        assert bool(hidden[image, found["masked_view"][image], own].all())


def test_sinkhorn_knopp_uses_prototypes_equally_often() -> None:
    objective, logits = opened("objective.sinkhorn_iterations=20"), torch.randn(64, 16)
    found = objective.shares(0.1 * logits, AT)
    assert torch.allclose(found.sum(1), torch.ones(64), atol=1e-5)
    assert torch.allclose(found.sum(0), torch.full((16,), 4.0), atol=1e-2)
    counted = torch.arange(64) < 32
    padded = objective.shares(0.1 * logits, AT, counted)
    assert torch.allclose(padded[:32], objective.shares(0.1 * logits[:32], AT), atol=1e-6)
    assert not padded[32:].any()


def test_sinkhorn_knopp_keeps_its_digits_where_logits_are_far_apart() -> None:
    """Logits 6 apart are 150 apart at a temperature of 0.04, more than float32 has exponents for."""
    objective, logits = opened(), torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    logits[:, 3] -= 6
    scaled = (logits.double() / 0.04).t()
    shares = (scaled - scaled.logsumexp((0, 1))).exp()
    for _ in range(objective.settings.sinkhorn_iterations):
        shares = shares / shares.sum(1, keepdim=True) / 16
        shares = shares / shares.sum(0, keepdim=True) / 8
    assert torch.allclose(objective.shares(logits, AT).double(), 8 * shares.t(), atol=1e-4)
    outlier = torch.cat([logits, torch.full((1, 16), 9.0)])
    padded = objective.shares(outlier, AT, torch.arange(9) < 8)
    assert torch.equal(padded[:8], objective.shares(logits, AT))
    assert not padded[8].any()


def test_momentum_and_temperature_follow_the_training() -> None:
    objective = opened("task=train", "task.epochs=100")
    assert [objective.momentum(step, 200) for step in (0, 100, 200)] == pytest.approx(
        [0.992, 0.996, 1]
    )
    assert objective.momentum(5, None) == 0.992
    steps = [replace(AT, number=number, total=200) for number in (0, 30, 60, 150)]
    assert [*map(objective.temperature, steps)] == pytest.approx([0.04, 0.055, 0.07, 0.07])


def test_no_matrix_product_rounds_the_loss_of_views() -> None:
    """A GPU may compute them in TF32, of whose 11 digits the difference of two shares loses most."""
    outputs = {"views": torch.randn(8, 4, 16, requires_grad=True)}
    with FlopCounterMode(display=False) as counter:
        opened().of_views(outputs, {"teacher": {"views": torch.randn(8, 2, 16)}}, AT).backward()
    assert counter.get_total_flops() == 0


def test_the_nearest_image_is_not_looked_for_in_tf32() -> None:
    with Products() as found:
        opened().koleo(torch.randn(8, 16, requires_grad=True), AT).backward()
    assert found.dtypes == {torch.float64}


class SoftmaxInHalf(OpenDistillation):
    """The student's shares are rounded to bfloat16."""

    def log_shares(self, logits: Tensor) -> Tensor:
        return super().log_shares(logits.bfloat16()).to(logits.dtype)


def test_a_gradient_keeps_its_digits_where_student_and_teacher_agree() -> None:
    """It is the difference of two shares, of which a softmax in bfloat16 loses percents (speculators#788)."""
    spec = asked(DINO, *SMALL, "sharding=none", "objective.sinkhorn_iterations=0",
                 "objective.small_views=0", ranks=1)  # fmt: skip
    trainer = trainer_of(spec)
    taught = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    student = (taught.flip(1) * 0.95 * 0.1 / 0.04).bfloat16()

    def gradient(objective: OpenDistillation, dtype: torch.dtype) -> Tensor:
        """Return that of the logits in the dtype of the loss."""
        wide: list[Tensor] = []

        def loss(outputs: Outputs, batch: Batch, step: Step) -> Tensor:
            wide.append(outputs["views"])
            outputs["views"].retain_grad()
            return objective.of_views(outputs, batch, step)

        trainer.objective = replace_loss(objective, loss)
        given = {"views": student.to(dtype).requires_grad_()}
        teacher = {"views": at_least_float32(taught.to(dtype))}
        trainer.criterion(given, {"teacher": teacher}, AT).backward()
        assert wide[0].grad is not None
        return wide[0].grad.double()

    def apart(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).norm() / wanted.norm())

    half, single, double = (
        gradient(OpenDistillation(spec), t) for t in (torch.bfloat16, torch.float32, torch.float64)
    )
    assert apart(half, single) < 1e-6
    assert (
        apart(single, double) < 2e-5
    )  # shares in float32, of whose difference a twentieth is left
    assert apart(gradient(SoftmaxInHalf(spec), torch.bfloat16), single) > 0.01


def replace_loss(objective: OpenDistillation, loss: Any) -> OpenDistillation:
    objective.loss = loss  # type: ignore[method-assign]
    return objective


def test_of_a_teacher_evaluations_are_and_tokens_count_what_is_trained() -> None:
    spec = asked(DINO, *SMALL, "sharding=none", ranks=1)
    assert spec.objective.tokens_per_image(spec) == 2 * 17 + 2 * 5
    trainer = trainer_of(spec)
    assert trainer.average is not None
    before = [average.clone() for average in trainer.average.averages]
    trainer.step(iter([batch(images=16)]))
    for average, old, weight in zip(
        trainer.average.averages, before, trainer.average._weights, strict=True
    ):
        assert torch.allclose(average, 0.992 * old + 0.008 * weight, atol=1e-7)


@pytest.mark.full
def test_a_resumed_training_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    kinds = [
        (DINO, *SMALL, "batch.images_per_step=512", *kind)
        for kind in (("sharding=ddp",), ("sharding=fsdp", "precision=O2"))
    ]
    for of_rank in interrupted(tmp_path, 2, kinds, (1,)):
        for whole, resumed, steps in of_rank:
            assert steps == [1]
            assert_same(whole, resumed)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("averaging=ema",), "`averaging=ema`"),
        (("batch.accumulation_steps=2",), "`batch.accumulation_steps=2`"),
        (
            ("objective.least_masked=0.4", "objective.most_masked=0.3"),
            "`objective.least_masked=0.4`",
        ),
        (("model.patch_px=8",), "`model.patch_px=8`"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(overrides: tuple[str, ...], named: str) -> None:
    found = entry(DINO, *SMALL, "resources.ranks_per_node=2", *overrides).reasons
    assert any(named in reason for reason in found), found
