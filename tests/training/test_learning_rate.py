"""The learning rate of `task=train`: a line up, half a cosine down."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.cells import cell
from tests.refusals import named
from tests.training.alone import alone, trainer_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.epochs import (
    _is_evaluated,
    learning_rate,
    set_learning_rate,
    summarized,
)

PEAK = 0.5


def task(epochs: int, warmup_epochs: float) -> CellSpec:
    spec = alone(f"optimizer.learning_rate={PEAK}")
    return replace(spec, task=replace(spec.task, epochs=epochs, warmup_epochs=warmup_epochs))


def rates(epochs: int, warmup_epochs: float, steps_per_epoch: int = 10) -> list[float]:
    total = epochs * steps_per_epoch
    return [learning_rate(task(epochs, warmup_epochs), step, total) for step in range(total)]


def test_it_rises_in_equal_steps_to_the_peak_and_never_starts_at_zero() -> None:
    found = rates(epochs=10, warmup_epochs=2)
    rises = [b - a for a, b in pairwise(found[:21])]
    assert found[0] == pytest.approx(PEAK / 21)
    assert rises == pytest.approx([PEAK / 21] * 20)
    assert found[20] == max(found) == PEAK


def test_it_falls_along_half_a_cosine_towards_zero() -> None:
    found = rates(epochs=10, warmup_epochs=2)
    assert found[20:] == sorted(found[20:], reverse=True)
    assert found[60] == pytest.approx(PEAK / 2), "half way down"
    assert 0 < found[-1] < PEAK * 0.001


def test_without_warm_up_it_starts_at_the_peak() -> None:
    assert rates(epochs=3, warmup_epochs=0)[0] == PEAK


def test_part_of_an_epoch_may_be_warm_up() -> None:
    found = rates(epochs=10, warmup_epochs=0.5)
    assert found[:5] == pytest.approx([PEAK * k / 6 for k in range(1, 6)])
    assert found[5] == PEAK


def test_a_warm_up_longer_than_the_training_never_reaches_the_peak() -> None:
    found = rates(epochs=2, warmup_epochs=4)
    assert found == sorted(found)
    assert found[-1] < PEAK


def timm_rate(t: int, t_initial: int, warmup_t: int, base: float) -> float:
    """`CosineLRScheduler(optimizer, t_initial, lr_min=1e-5, warmup_t=warmup_t, warmup_lr_init=1e-6)`."""
    if t < warmup_t:
        return 1e-6 + t * ((base - 1e-6) / warmup_t)
    return 1e-5 + 0.5 * (base - 1e-5) * (1 + math.cos(math.pi * t / t_initial))


def pycls_rate(cur_epoch: int, max_epoch: int, warmup_epochs: int, base_lr: float) -> float:
    """`get_epoch_lr` with OPTIM.MIN_LR 0.005 and OPTIM.WARMUP_FACTOR 0.1."""
    rate = 0.5 * (1.0 + math.cos(math.pi * cur_epoch / max_epoch))
    rate = ((1.0 - 0.005) * rate + 0.005) * base_lr
    if cur_epoch < warmup_epochs:
        alpha = cur_epoch / warmup_epochs
        rate *= 0.1 * (1.0 - alpha) + alpha
    return rate


@pytest.mark.parametrize(
    ("recipe", "formula", "peak"),
    [("deit_300", timm_rate, 0.0005 * 1024 / 512), ("pycls_100", pycls_rate, 0.001)],
)
def test_a_published_recipe_has_the_schedule_of_its_source(recipe, formula, peak) -> None:
    for short in (
        (),
        ("task.epochs=10", "task.warmup_epochs=2"),
        ("task.epochs=3", "task.warmup_epochs=0"),
    ):
        spec = cell("task=train", f"recipe={recipe}", "batch.images_per_step=1024", *short)
        spec = replace(spec, optimizer=spec.recipe.optimizer(spec))
        epochs, warm_up = spec.task.epochs, int(spec.task.warmup_epochs)
        for per_epoch in (1, 7, 1251):
            steps = {
                *range(0, epochs * per_epoch, 5),
                *range(per_epoch - 1, epochs * per_epoch, per_epoch),
            }
            for step in steps:
                wanted = formula(step // per_epoch, epochs, warm_up, peak)
                found = learning_rate(spec, step, epochs * per_epoch)
                assert found == pytest.approx(wanted, rel=1e-12, abs=0)


def test_every_group_of_the_optimizer_gets_the_rate() -> None:
    trainer = trainer_of(task(10, 2))
    assert len(trainer.optimizer.param_groups) == 2
    set_learning_rate(trainer.optimizer, trainer.cell, 60, 100)
    assert [g["lr"] for g in trainer.optimizer.param_groups] == pytest.approx([PEAK / 2] * 2)


def test_where_a_training_diverged_the_target_was_missed_in_the_epochs_that_were_trained() -> None:
    spec = task(epochs=30, warmup_epochs=5)
    spec = replace(spec, task=replace(spec.task, target_accuracy=0.9))
    point = {"seconds": 1.0, "accuracy_top1": 0.25, "accuracy_top5": 0.5}
    curve = [{**point, "epoch": 1}, {**point, "epoch": 2}]
    said = summarized(spec, curve, 2.0).reasons["seconds_to_target_reason"]
    assert {"`task.target_accuracy=0.9`", "0.2500", "2"} <= named(said)


def test_the_model_is_evaluated_every_so_many_epochs_and_after_the_last() -> None:
    for every, epochs in ((None, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])):
        spec = task(epochs=5, warmup_epochs=0)
        spec = replace(spec, task=replace(spec.task, evaluate_every_epochs=every))
        assert [epoch for epoch in range(1, 6) if _is_evaluated(spec, epoch)] == epochs


def test_columns_of_a_training_are_those_of_its_curve() -> None:
    spec = task(epochs=3, warmup_epochs=0)
    curve = [
        {"epoch": epoch, "seconds": 10.0 * epoch, "accuracy_top1": top1, "accuracy_top5": 0.9}
        for epoch, top1 in ((1, 0.5), (2, 0.8), (3, 0.7))
    ]
    for target, seconds, epoch, is_missed in (
        (None, None, None, False), (0.5, 10.0, 1, False), (0.6, 20.0, 2, False), (0.8, 20.0, 2, False),
        (0.81, None, None, True),
    ):  # fmt: skip
        own = replace(spec, task=replace(spec.task, target_accuracy=target))
        found = summarized(own, curve, 31.0)
        assert found.metrics == {
            "accuracy_top1": 0.7, "accuracy_top5": 0.9, "train_seconds": 31.0,
            "seconds_to_target": seconds, "epochs_to_target": epoch,
        }  # fmt: skip
        assert bool(found.reasons) is is_missed
        assert found.curve == curve
    empty = summarized(own, [], 1.0)
    assert (empty.metrics["accuracy_top1"], len(empty.reasons)) == (None, 1)
