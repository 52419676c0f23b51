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


def test_maps_of_distortions_are_those_of_their_strength() -> None:
    """Shears of 0.3, moves of 0.45 of the side (which is 2 long) and 30 degrees at full strength."""
    turn = np.pi / 12
    for kind, rows in (
        (0, [[1, 0.15, 0], [0, 1, 0]]),
        (1, [[1, 0, 0], [0.15, 1, 0]]),
        (2, [[1, 0, 0.45], [0, 1, 0]]),
        (3, [[1, 0, 0], [0, 1, 0.45]]),
        (4, [[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0]]),
        (5, np.eye(3)[:2]),
    ):
        both = regularize._affine(np.array([kind, 8]), np.array([0.5, 0.5]))
        np.testing.assert_allclose(both[0], [*np.array(rows), [0, 0, 1]], atol=1e-12)
        np.testing.assert_array_equal(both[1], np.eye(3))


def test_photometric_distortions_by_their_formulas() -> None:
    """Strengths count 0.9 times; of 3 x 3 pixels the middle has eight neighbours, a corner three."""
    given = torch.arange(9.0).reshape(1, 1, 3, 3)

    def changed(kind: int, strength: float) -> torch.Tensor:
        strengths = np.zeros((4, 1))
        strengths[kind] = strength
        return regularize._photometric(given, strengths)[0, 0]

    flat = given[0, 0]
    torch.testing.assert_close(changed(0, -1.0), flat - 0.9)
    torch.testing.assert_close(changed(1, 1.0), 4 + 1.9 * (flat - 4))
    blurred = torch.tensor([[2.0, 2.5, 3.0], [3.5, 4.0, 4.5], [5.0, 5.5, 6.0]])
    torch.testing.assert_close(changed(2, 1.0), flat + 0.9 * (flat - blurred))
    for strength in (0.5, -0.5):  # above 0.55 x 8 = 4.4 values are mirrored
        expected = torch.where(flat > 4.4, 8.8 - flat, flat)
        torch.testing.assert_close(changed(3, strength), expected)
    assert torch.equal(changed(3, 0.0), flat)


class Script:
    """A generator that returns what it was given, and notes the arguments."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = iter(answers), list[Any]()

    def __getattr__(self, name: str) -> Any:
        def answer(*given: Any, **named: Any) -> Any:
            self.asked.append((name, given, named))
            return next(self.answers)

        return answer


def test_each_image_is_distorted_by_kinds_strengths_and_signs_of_its_own() -> None:
    given, asked = images(2, 20), recipe(rand_augment_ops=2, rand_augment_magnitude=9.0)
    script = Script(
        np.array([2, 5, 0]), np.array([20 / 4.5, 12.0, 1.0]), np.array([1, -1, 1]),
        np.array([5, 5, 0]), np.array([-3.0, 5.0, 1.0]), np.array([1, 1, 1]),
    )  # fmt: skip
    found = regularize.rand_augmented(given, asked, script, 3, slice(0, 2))  # type: ignore[arg-type]
    moved = found[0, :, :, :16]  # by 0.2 of the side; a magnitude below 0 does nothing
    torch.testing.assert_close(moved, given[0, :, :, 4:], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], given[1] + 0.9 * (-1 + 0.5), atol=1e-4, rtol=0)
    assert script.asked[:3] == [
        ("integers", (9,), {"size": 3}), ("normal", (9.0, 0.5, 3), {}), ("choice", ((-1, 1), 3), {}),
    ]  # fmt: skip
    assert regularize.rand_augmented(given, recipe(), Script(), 3, slice(0, 2)) is given  # type: ignore[arg-type]


def test_boxes_hold_the_pixels_whose_middle_lies_inside() -> None:
    centres, half = np.array([[0.5, 0.0], [0.25, 1.0]]), np.array([[0.2, 0.3], [0.125, 0.2]])
    found = regularize._boxes(torch.zeros(2, 1, 4, 8), centres, half)
    rows = [[i for i in range(4) if bool(mask[0, i].any())] for mask in found]
    columns = [[i for i in range(8) if bool(mask[0, :, i].any())] for mask in found]
    assert rows == [[1, 2], [0]]
    assert columns == [[1, 2], [6, 7]]
    assert found.sum(dim=(1, 2, 3)).tolist() == [4, 2]


def test_a_rectangle_has_its_area_and_aspect_and_noise_of_its_image() -> None:
    given = torch.zeros(2, 1, 8, 8)
    script = Script(
        np.array([0.9, 0.1, 0.4]), np.array([0.5, 0.25, 0.0625]), np.log([1.0, 4.0, 1.0]),
        np.array([[0.5, 0.5, 0.5], [0.5, 0.5, 0.25]]), 7,
    )  # fmt: skip
    found = regularize.erased(given, 0.5, script, 3, slice(1, 3))  # type: ignore[arg-type]
    masks = found != 0
    assert masks[0].sum() == 8 * 2, "an area of a quarter, four times as high as wide"
    assert masks[0, 0, :, 3:5].all()
    assert masks[1].sum() == 2 * 2
    assert masks[1, 0, 3:5, 1:3].all()
    for place, row in enumerate((1, 2)):
        noise = torch.empty(1, 8, 8).normal_(generator=torch.Generator().manual_seed(7 + row))
        assert torch.equal(found[place][masks[place]], noise[masks[place]])
    (_, area, _), (_, aspect, _) = script.asked[1:3]
    assert area == (0.02, 1 / 3, 3)
    assert aspect == pytest.approx((np.log(0.3), -np.log(0.3), 3))
    assert script.asked[4][1] == (2**62,)


def test_shares_of_mixed_images_are_those_that_were_drawn() -> None:
    given, labels = (
        torch.tensor([1.0, 5.0]).reshape(2, 1, 1, 1).expand(2, 1, 8, 8),
        torch.tensor([0, 2]),
    )
    script = Script(0.25, np.zeros((2, 1)))
    found, shares = regularize.mixed(given, labels, recipe(mixup_alpha=0.8), script, 3)  # type: ignore[arg-type]
    assert found[:, 0, 0, 0].tolist() == [4.0, 2.0]
    assert shares.tolist() == [[0.25, 0, 0.75], [0.75, 0, 0.25]]
    assert script.asked[0][1] == (0.8, 0.8)
    script = Script(0.75, np.full((2, 1), 0.5))
    found, shares = regularize.mixed(given, labels, recipe(cutmix_alpha=2.0), script, 3)  # type: ignore[arg-type]
    assert (found[0] == 5).sum() == 16, "a quarter, half as long as each side"
    assert (found[0, 0, 2:6, 2:6] == 5).all()
    assert shares.tolist() == [[0.75, 0, 0.25], [0.25, 0, 0.75]]
    assert script.asked[0][1] == (2.0, 2.0)
    both = recipe(mixup_alpha=0.8, cutmix_alpha=2.0)
    for drawn_number, alpha in ((0.49, 2.0), (0.5, 0.8)):
        script = Script(drawn_number, 0.5, np.full((2, 1), 0.5))
        regularize.mixed(given, labels, both, script, 3)  # type: ignore[arg-type]
        assert script.asked[1][1] == (alpha, alpha)
    assert regularize.mixed(given, labels, recipe(), Script(), 3) == (given, labels)  # type: ignore[arg-type]
