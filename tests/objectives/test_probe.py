"""The linear probe against scikit-learn's, features of whole images on ranks, and collapse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV

from tests.data.cells_and_worlds import world as alone
from tests.objectives.verdicts import asked
from tests.ranks import on_ranks, placed
from tests.training.alone import trainer_of
from vitsweep.model.build import first_model
from vitsweep.objectives.base import as_entries
from vitsweep.objectives.probe import PENALTIES, probe_accuracy, spread
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.epochs import evaluate
from vitsweep.world import World

SMALL = {
    "masked_autoencoder": ("decoder_depth=1", "decoder_width=32", "decoder_heads=4"),
    "lejepa": ("projector_width=32", "directions=8", "small_views=2"),
    "self_distillation": ("prototypes=16", "head_width=32", "bottleneck=16", "small_views=2"),
}


def of_kind(kind: str, *overrides: str, ranks: int = 1) -> CellSpec:
    own = (f"objective.{text}" for text in (*SMALL[kind], "probe_images=50"))
    return asked(f"objective={kind}", *own, "data=digits", "task=train", *overrides, ranks=ranks)


def test_the_probe_is_ridge_regression_with_the_best_left_out_error() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (90,), generator=generator)
    features = torch.randn(90, 6, generator=generator, dtype=torch.float64) * 3 + 1
    features[:, :4] += torch.nn.functional.one_hot(labels, 4)
    expected = []
    for share in range(3):
        is_fitted = np.arange(90) % 3 == share
        fitted, others = features.numpy()[is_fitted], features.numpy()[~is_fitted]
        mean, deviation = fitted.mean(0), fitted.std(0)
        targets = np.eye(4)[labels.numpy()[is_fitted]]
        found = RidgeCV([30 * p for p in PENALTIES]).fit((fitted - mean) / deviation, targets)
        guessed = found.predict((others - mean) / deviation).argmax(1)
        expected.append((guessed == labels.numpy()[~is_fitted]).mean())
    assert len({*expected}) > 1
    assert probe_accuracy(features, labels, 30) == pytest.approx(np.mean(expected), abs=1e-12)
    halves = probe_accuracy(features, labels, None)
    assert halves == probe_accuracy(features, labels, 45) != probe_accuracy(features, labels, 30)


def test_features_that_are_one_vector_have_no_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(500, 64, generator=generator, dtype=torch.float64)
    assert spread(around) == pytest.approx(1, abs=0.01)
    assert spread(around.abs().max() * 1e4 + around) < 1e-6
    assert spread(torch.ones(5, 3).double() * torch.arange(1, 6)[:, None]) < 1e-15


def evaluated(world: World, spec: CellSpec) -> dict[str, float]:
    if world.size > 1:
        world = placed(world, spec)
    trainer = parallelize(first_model(spec), spec, world)
    return evaluate(trainer, spec.data.open(spec, world), 0, 0.0)


def test_scores_are_those_of_one_rank(tmp_path: Path) -> None:
    kind = "self_distillation"
    spec = of_kind(kind, "sharding=fsdp", ranks=2)
    found, other = on_ranks(2, evaluated, spec, spec, folder=tmp_path)
    assert found == other
    wanted = evaluated(alone(), of_kind(kind, "sharding=none"))
    assert {*found} == {"epoch", "seconds", *spec.objective.scores}
    assert found["probe_top1"] == pytest.approx(wanted["probe_top1"], abs=2e-3)
    for name in ("feature_spread", "prototype_information"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-3)


@pytest.mark.filterwarnings("ignore:var_mean")  # of no images
@pytest.mark.parametrize("kind", SMALL)
def test_a_batch_of_damaged_images_alone_adds_nothing_to_scores(kind: str) -> None:
    spec = of_kind(kind, "sharding=none")
    trainer = trainer_of(spec)
    image, label = next(iter(spec.data.open(spec, trainer.world).test()))
    at = replace(trainer.at(), num_images=len(image), of_held_out=True)
    whole = as_entries((image, label)), at
    none = as_entries((image[:0], label[:0])), replace(at, first=len(image))

    def scores(*batches: Any) -> dict[str, float]:
        return trainer.objective.evaluate(trainer.predict, batches, trainer.world.device)

    assert scores(none, whole, none) == scores(whole)


@pytest.mark.parametrize("kind", SMALL)
def test_collapse_is_a_flag(kind: str) -> None:
    """Of one vector for all images, whatever the loss says of it."""
    spec = of_kind(kind, "sharding=none")
    trainer = trainer_of(spec)
    batches = spec.data.open(spec, trainer.world)
    healthy = evaluate(trainer, batches, 0, 0.0)
    assert trainer.objective.flags(healthy) == {"collapsed": False}
    model: Any = trainer.model
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(1)
        if trainer.average:
            torch._foreach_copy_(trainer.average.averages, trainer.average._weights)
    collapsed = evaluate(trainer, batches, 0, 0.0)
    assert trainer.objective.flags(collapsed) == {"collapsed": True}
    assert collapsed["probe_top1"] < 0.2 < healthy["probe_top1"]
