"""Recipes: what they replace while a cell trains, and when they are refused."""

from dataclasses import replace

import pytest

from tests.cells import cell, entry
from tests.refusals import named
from vitsweep.spec.cell_spec import CellSpec, identity


def reasons(*overrides: str) -> str:
    return " ".join(entry(*overrides).reasons)


def test_without_a_recipe_a_training_is_what_it_was() -> None:
    plain = cell("task=train")
    assert (plain.task.epochs, plain.task.warmup_epochs, plain.task.label_smoothing) == (30, 5, 0.1)
    assert plain.recipe.optimizer(plain) == plain.optimizer


def test_a_recipe_gives_what_says_auto_and_what_is_typed_counts() -> None:
    deit = cell("task=train", "recipe=deit_300", "task.epochs=7")
    assert (deit.task.epochs, deit.task.warmup_epochs) == (7, 5)
    assert cell("task=train", "recipe=short_20").task.epochs == 20
    assert deit.cell_id != cell("task=train", "task.epochs=7").cell_id


def test_a_schedule_counts_in_the_id_of_a_cell_where_it_is_set() -> None:
    for name in ("none", "digits", "short_20", "deit_300", "pycls_100"):
        recipe = cell("task=train", f"recipe={name}").recipe
        assert ("learning_rate_schedule" in identity(recipe)) == (name in ("deit_300", "pycls_100"))


@pytest.mark.parametrize(("images", "rate"), [(512, 0.0005), (1024, 0.001)])
def test_the_learning_rate_grows_with_the_batch(images: int, rate: float) -> None:
    spec: CellSpec = cell("task=train", "recipe=deit_300", f"batch.images_per_step={images}")
    trained = spec.recipe.optimizer(spec)
    assert trained.learning_rate == pytest.approx(rate)
    assert trained.weight_decay == 0.05
    assert replace(trained, learning_rate=spec.optimizer.learning_rate) == spec.optimizer
    pycls = cell("task=train", "recipe=pycls_100", f"batch.images_per_step={images}")
    assert pycls.recipe.optimizer(pycls).learning_rate == 0.001


def test_a_recipe_that_cannot_work_is_refused_with_the_way_out() -> None:
    for overrides, said in [
        (
            ("recipe=deit_300",),
            "`recipe=deit_300` has no effect with `task=measure`",
        ),
        (
            ("recipe.mixup_alpha=0.8", "recipe.drop_path=0.1"),
            "`recipe.mixup_alpha=0.8` and `recipe.drop_path=0.1` have no effect with `task=meas",
        ),
        (("task.epochs=2",), "use `task=train task.epochs=2`"),
        (
            ("task=train", "task.epochs=0"),
            "`task.epochs=0` trains nothing: give epochs",
        ),
        (
            ("task=train", "recipe=deit_300", "optimizer.learning_rate=0.01"),
            "`optimizer.learning_rate=0.01` would have no effect on the training, in which "
            "`recipe=deit_300` sets 0.0005: use `recipe.learning_rate=0.01`",
        ),
        (
            ("task=train", "recipe=deit_300", "optimizer=sgd_fused"),
            "`recipe=deit_300` has no learning rate for `optimizer=sgd_fused`",
        ),
        (
            ("task=train", "recipe.mixup_alpha=1.0", "data=moving_digits", "model=video_vit_nano"),
            "needs single images with one label, not `data=moving_digits`",
        ),
        (
            ("task=train", "recipe.mixup_alpha=1.0", "batch.images_per_step=2"),
            "mixes pairs, not a micro-batch of 1",
        ),
        (
            ("task=train", "recipe.drop_path=0.1", "vit_block=drop_samples"),
            "both drop branches: use `recipe.drop_path=0`",
        ),
        (
            ("task=train", "recipe.drop_path=0.1", "tensor_parallel=megatron"),
            "needs `tensor_parallel=none`: use `recipe.drop_path=0`",
        ),
    ]:
        assert said in reasons(*overrides)


def test_a_training_without_epochs_is_not_asked_to_train() -> None:
    assert "use `task=train`" not in reasons("task=train", "task.epochs=0", "recipe=digits")


def test_a_recipe_leaves_the_measured_steps_alone() -> None:
    """The typed learning rate is that of the timed steps where nothing is trained."""
    assert not reasons("optimizer.learning_rate=0.01")
    assert not reasons("task=train", "recipe=deit_300", "recipe.learning_rate=null",
                       "optimizer.learning_rate=0.01")  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("task.target_accuracy=0.9", "task.target_accuracy=0.9"),
        ("task.evaluate_every_epochs=5", "task.evaluate_every_epochs=5"),
        ("task.checkpoint_minutes=null", "task.checkpoint_minutes=null"),
    ],
)
def test_settings_of_a_training_are_refused_where_there_is_none(setting: str, shown: str) -> None:
    assert {f"`{shown}`", "`task=measure`"} <= named(reasons(setting))
    assert reasons("task=train", setting) == ""
