"""Loss scaling: how the scale moves, and a verdict on overflow that all ranks share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import cell
from tests.equivalence import whole_weights
from tests.ranks import on_ranks, placed
from tests.training.alone import alone, batch, state, trainer_of, weights
from vitsweep.cell import RunContext, run_cell
from vitsweep.measure.summarize import Summary
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainer import Trainer
from vitsweep.training.update import LossScaler
from vitsweep.world import World

FLOAT16 = "precision.half_dtype=float16"
LOST_STEP = 1
"""The step in whose backward pass the last rank's gradients overflow."""


def scaled(scale: Any, gradients: list[float]) -> tuple[list[float], list[float], float]:
    """Scales before each step, the flags of the steps, and the parameter at the end."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler, scales, flags = LossScaler(scale, "cpu"), [], []
    for gradient in gradients:
        scaler.scale(parameter * gradient).backward()
        scales.append(scaler.current)
        flags.append(float(scaler.unscale(optimizer)))
        scaler.step(optimizer)
        optimizer.zero_grad()
    return [*scales, scaler.current], flags, float(parameter.detach())


INF = float("inf")


def test_a_dynamic_scale_starts_at_apexs_and_halves_after_each_overflow() -> None:
    scales, flags, end = scaled("dynamic", [1.0, INF, 2.0, float("nan"), 4.0])
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**14, 2.0**14]
    assert flags == [0, 1, 0, 1, 0]
    assert end == -7.0, "gradients are unscaled; those of skipped steps are never applied"


def test_a_dynamic_scale_doubles_after_two_thousand_good_steps() -> None:
    scales, _, _ = scaled("dynamic", [0.0] * 2001)
    assert scales[1999] == 2.0**16
    assert scales[2000] == scales[2001] == 2.0**17


def test_a_constant_scale_stays_and_still_skips_overflows() -> None:
    scales, flags, end = scaled(128.0, [1.0, INF, 2.0])
    assert scales == [128.0] * 4
    assert flags == [0, 1, 0]
    assert end == -3.0


@pytest.mark.parametrize(
    ("overrides", "scale"),
    [
        (["precision=O1"], None),
        (["precision=O2"], None),
        (["precision=O1", FLOAT16], 2.0**16),
        (["precision=O2", FLOAT16, "precision.loss_scale=128"], 128.0),
        (["precision=O1", "precision.loss_scale=64"], 64.0),
        (["precision=O3", FLOAT16], None),
        (["precision=fp32"], None),
    ],
)
def test_a_scaler_is_there_where_the_precision_asks_for_one(
    overrides: list[str], scale: float | None
) -> None:
    scaler = trainer_of(alone(*overrides)).scaler
    assert (scaler.current if scaler else None) == scale


def test_scaling_changes_no_update() -> None:
    """Scales are powers of two: exact, as long as nothing underflows."""
    given = ("precision=O1", "optimizer=sgd_loop")
    ends = []
    for scale in ("null", "1024"):
        trainer = trainer_of(alone(*given, f"precision.loss_scale={scale}"))
        for step in range(3):
            trainer.step(iter([batch(step)]))
        ends.append(weights(trainer))
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-7)


class Overflow(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * INF


def plant_overflow(trainer: Trainer, in_step: int) -> None:
    """Let the backward pass of one step overflow; the loss itself stays what it was."""
    honest, calls = trainer.loss, iter(range(1_000_000))

    def loss(*batch_and_step: Any) -> Tensor:
        value = honest(*batch_and_step)
        return Overflow.apply(value) if next(calls) == in_step else value

    trainer.loss = loss  # type: ignore[method-assign]


@dataclass
class JobState:
    """What a rank saw of each step."""

    weights: list[dict[str, Tensor]]
    scales: list[float]
    skipped: list[float]
    losses: list[float]
    states: list[Any]
    non_finite: bool


def train_with_overflow(world: World, cells: list[CellSpec]) -> list[JobState]:
    return [_seen(placed(world, spec), spec) for spec in cells]


def _seen(world: World, spec: CellSpec) -> JobState:
    torch.manual_seed(spec.seed)
    trainer = parallelize(build_model(spec), spec, world)
    if world.rank == world.size - 1:
        plant_overflow(trainer, LOST_STEP)
    assert trainer.scaler
    seen = JobState([], [], [], [], [], False)
    for step in range(3):
        share = my_share(spec, global_batch(spec, step, world), world)
        seen.losses.append(float(trainer.step(iter(share))))
        seen.weights.append(whole_weights(trainer.model.named_parameters()))
        seen.scales.append(trainer.scaler.current)
        seen.states.append(_local(state(trainer)))
    seen.skipped = [float(flag) for flag in trainer.skipped]
    seen.non_finite = bool(trainer.non_finite)
    return seen


def _local(kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def plain(value: Any) -> Any:
        return value.to_local().clone() if hasattr(value, "to_local") else value

    return [{key: plain(value) for key, value in one.items()} for one in kept]


SHARDINGS = ("ddp", "zero1", "zero2", "fsdp")
IN_THEIR_KERNEL = [
    ("O1", "adamw_fused"),
    ("O2", "adamw_fused"),
    ("O1", "sgd_fused"),
    ("O1", "adamw_foreach"),
    ("O2", "adamw_contiguous"),
]
"""Fused optimizers are told of an overflow and skip by themselves."""
Key = tuple[str, ...]
CASES: list[Key] = [
    *((f"precision={o}", f"sharding={s}") for o in ("O1", "O2") for s in SHARDINGS),
    *((f"precision={o}", "sharding=ddp", f"optimizer={kind}") for o, kind in IN_THEIR_KERNEL),
]


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory: pytest.TempPathFactory) -> dict[Key, list[JobState]]:
    """What two ranks saw of each case."""
    # Mean tokens of many images: gradients at a fifth of what float16 holds, so that none but the
    # planted one overflows, whatever weights a version of torch draws from the seed.
    calm = ("classifier=pooled", "batch.images_per_step=64")
    small = ("model.depth=1", "resources.threads_per_rank=1")
    cells = [cell(FLOAT16, *small, *calm, *case) for case in CASES]
    folder = tmp_path_factory.mktemp("overflow")
    ranks = on_ranks(2, train_with_overflow, cells[0], cells, folder=folder)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    case: Key, overflowed: dict[Key, list[JobState]]
) -> None:
    for rank in overflowed[case]:
        assert rank.skipped == [0, 1, 0]
        assert rank.scales == [2.0**16, 2.0**15, 2.0**15]
        before, lost, after = rank.weights
        assert all(torch.equal(lost[name], before[name]) for name in before)
        assert any(not torch.equal(after[name], lost[name]) for name in after)
        assert all(torch.isfinite(value).all() for value in after.values())
        assert all(abs(loss) < 100 for loss in rank.losses)
        assert not rank.non_finite, "the loss itself was finite: the run has not diverged"
        assert_same_state(rank.states[0], rank.states[1])
    one, two = (rank.weights[2] for rank in overflowed[case])
    assert all(torch.equal(one[name], two[name]) for name in one)


def assert_same_state(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    """A skipped step leaves moments and step counts as they were."""
    assert any(a)
    for before, after in zip(a, b, strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            torch.testing.assert_close(after[key], value, rtol=0, atol=0)


def _verdicts(world: World) -> list[float]:
    """Gradients that differ between ranks, as with pipeline stages or tensor shards."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler, found = LossScaler("dynamic", "cpu"), []
    for bad_rank in (None, 0, 1, None):
        parameter.grad = torch.full((3,), INF if bad_rank == world.rank else 2.0**16)
        scaler.scale(torch.ones(()))
        found += [float(scaler.unscale(optimizer)), scaler.current]
        scaler.step(optimizer)
        found.append(float(parameter.detach()[0]))
    return found


def test_ranks_with_gradients_of_their_own_agree_on_an_overflow(tmp_path: Path) -> None:
    one, two = on_ranks(2, _verdicts, cell(), folder=tmp_path)
    assert one == two
    assert one == [0, 2.0**16, -1.0, 1, 2.0**16, -1.0, 1, 2.0**15, -1.0, 0, 2.0**14, -5.0]


def _recorded(world: World, spec: CellSpec) -> Summary:
    """Run a cell whose fourth step overflows on the last rank."""
    from vitsweep import cell as page

    honest = page.parallelize

    def with_overflow(*given: Any) -> Trainer:
        trainer = honest(*given)
        if world.rank == world.size - 1:
            plant_overflow(trainer, 3)
        return trainer

    page.parallelize = with_overflow
    return run_cell(spec, world, RunContext(proved="known", folder=Path()))


def test_a_skipped_step_is_in_the_record_and_left_out_of_the_speed(tmp_path: Path) -> None:
    spec = cell("precision=O1", FLOAT16, "precision.loss_scale=1024", "measurement=smoke")
    spec = replace(spec, measurement=replace(spec.measurement, warmup_steps=1, measured_steps=5))
    summary = on_ranks(2, _recorded, spec, spec, folder=tmp_path)[0]
    assert summary.samples["skipped"] == [False, False, False, True, False, False]
    assert summary.validity["steps_skipped"] == 1
    times = torch.tensor(summary.samples["step_time_ms"], dtype=torch.float64)
    counted = [i for i in range(summary.samples["warm_up_steps"], 6) if i != 3]
    assert summary.validity["steps_counted"] == len(counted)
    elapsed = times[:, counted].sum(1).max()
    assert summary.metrics["step_time_ms"] == pytest.approx(float(elapsed) / len(counted), rel=1e-3)
    assert summary.validity["proved"] == "known"
