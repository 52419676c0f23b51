"""Augmentation: what is mixed, what is left alone, and that replicas and resumed trainings draw the same."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.choices import choice
from tests.data.cells_and_worlds import cell as data_cell
from tests.data.cells_and_worlds import world
from vitsweep.spec.cell_spec import Recipe
from vitsweep.training import regularize
from vitsweep.training.regularize import augmented


def recipe(**settings: Any) -> Recipe:
    return replace(choice("recipe", "none"), **settings)


def drawn(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def images(count: int = 8, side: int = 16, channels: int = 1) -> torch.Tensor:
    return torch.randn((count, channels, side, side), generator=torch.Generator().manual_seed(1))


LABELS = torch.arange(8)
SWAPPED = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])


def test_mixup_averages_each_image_with_its_neighbour_and_the_labels_alike() -> None:
    given = images()
    mixed, shares = regularize.mixed(given, LABELS, recipe(mixup_alpha=0.8), drawn(), 10)

    share = float(shares[0, 0])
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * given + (1 - share) * given[SWAPPED])
    torch.testing.assert_close(shares.sum(1), torch.ones(8))
    assert float(shares[0, 1]) == pytest.approx(1 - share)


def test_cutmix_shares_of_labels_are_shares_of_pixels() -> None:
    given = images()
    for seed in range(20):
        mixed, shares = regularize.mixed(given, LABELS, recipe(cutmix_alpha=1.0), drawn(seed), 10)
        kept = (mixed == given).all(1).float().mean(dim=(1, 2))
        assert ((mixed == given) | (mixed == given[SWAPPED])).all()
        torch.testing.assert_close(kept, shares[torch.arange(8), LABELS])


def test_with_both_alphas_each_is_drawn() -> None:
    given, both = images(), recipe(mixup_alpha=0.8, cutmix_alpha=1.0)
    found = [regularize.mixed(given, LABELS, both, drawn(seed), 10)[0] for seed in range(20)]
    cuts = [bool(((m == given) | (m == given[SWAPPED])).all()) for m in found]
    assert 4 < sum(cuts) < 16


def test_random_distortions_change_images_and_keep_their_level() -> None:
    given = images(256, channels=3)
    strong = recipe(rand_augment_ops=2, rand_augment_magnitude=9.0)
    found = regularize.rand_augmented(given, strong, drawn(), 256, slice(0, 256))

    changed = (found - given).flatten(1).abs().amax(1) > 1e-3
    assert changed.float().mean() > 0.95
    assert torch.isfinite(found).all()
    assert abs(float(found.mean())) < 0.2
    weak = regularize.rand_augmented(given, recipe(rand_augment_ops=2), drawn(), 256, slice(0, 256))
    assert (weak - given).square().mean() < 0.3 * (found - given).square().mean()


@pytest.mark.parametrize(("kind", "axis"), [(2, 3), (3, 2)])
def test_a_translation_moves_along_its_axis(kind: int, axis: int) -> None:
    """The whole strength of 1 moves by 0.45 of the side."""
    maps = regularize._affine(np.array([kind]), np.array([20 / 45]))  # 0.2 of the side: 4 of 20 px
    grid = torch.nn.functional.affine_grid(
        torch.from_numpy(maps[:, :2]).float(), [1, 1, 20, 20], align_corners=False
    )
    given = images(1, 20)
    moved = torch.nn.functional.grid_sample(given, grid, align_corners=False)
    torch.testing.assert_close(
        moved.narrow(axis, 0, 16), given.narrow(axis, 4, 16), atol=1e-4, rtol=0
    )
    assert not moved.narrow(axis, 16, 4).any()


def test_a_rotation_keeps_distances() -> None:
    maps = regularize._affine(np.array([4]), np.array([1.0]))[0]
    np.testing.assert_allclose(maps[:2, :2] @ maps[:2, :2].T, np.eye(2), atol=1e-12)
    assert np.degrees(np.arccos(maps[0, 0])) == pytest.approx(30)


def test_the_asked_share_of_images_loses_a_rectangle() -> None:
    given = torch.zeros(2000, 1, 16, 16)
    found = regularize.erased(given, 0.25, drawn(), 2000, slice(0, 2000))
    area = (found != 0).float().mean(dim=(1, 2, 3))
    assert float((area > 0).float().mean()) == pytest.approx(0.25, abs=0.04)
    assert float(area.max()) < 0.45


def batches_of(spec: Any, rank: int, replicas: int, step: int) -> list[tuple[Any, Any]]:
    digits = choice("data", "digits").open(spec, world(rank, replicate=replicas))
    stream = digits.train(0, step * spec.batch.accumulation_steps)
    return list(islice(augmented(stream, spec, world(rank, replicate=replicas), step), 4))


ALL = {
    "rand_augment_ops": 2, "rand_augment_magnitude": 9.0, "erase_probability": 0.5,
    "mixup_alpha": 0.8, "cutmix_alpha": 1.0,
}  # fmt: skip


def augmenting_cell(replicas: int, accumulation: int = 1, **settings: Any) -> Any:
    spec = data_cell(images_per_step=32, replicas=replicas, accumulation_steps=accumulation)
    spec.recipe = recipe(**settings)
    spec.model.num_classes = 10
    return spec


@pytest.mark.parametrize("step", range(3))
def test_replicas_and_micro_batches_share_the_images_of_one(step: int) -> None:
    [whole, labels] = batches_of(augmenting_cell(1, **ALL), 0, 1, step)[0]
    halves = [batches_of(augmenting_cell(2, **ALL), rank, 2, step)[0] for rank in range(2)]
    torch.testing.assert_close(torch.cat([half for half, _ in halves]), whole)
    assert torch.equal(torch.cat([half for _, half in halves]), labels)
    in_turn = batches_of(augmenting_cell(1, accumulation=2, **ALL), 0, 1, step)[:2]
    torch.testing.assert_close(torch.cat([half for half, _ in in_turn]), whole)
    assert torch.equal(torch.cat([half for _, half in in_turn]), labels)


def test_a_resumed_training_draws_what_the_whole_one_drew() -> None:
    whole = batches_of(augmenting_cell(1, **ALL), 0, 1, 0)
    resumed = batches_of(augmenting_cell(1, **ALL), 0, 1, 2)
    for (a, a_labels), (b, b_labels) in zip(whole[2:], resumed, strict=False):
        assert torch.equal(a, b)
        assert torch.equal(a_labels, b_labels)
    assert not torch.equal(whole[0][0], whole[1][0])
