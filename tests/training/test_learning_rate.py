"""The learning rate of `task=train`: a line up, half a cosine down."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.training.alone import alone, trainer_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.epochs import learning_rate, set_learning_rate, summarized

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
    assert said == "`task.target_accuracy=0.9` was not reached: 0.2500 at most in 2 epochs"
