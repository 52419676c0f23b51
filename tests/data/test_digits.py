import numpy as np
import torch

from tests.choices import choice
from tests.data.cells_and_worlds import cell, world
from tests.refusals import require
from vitsweep.data import digits


def opened(rank: int = 0, replicas: int = 1, **asked):
    return choice("data", "digits").open(
        cell(replicas=replicas, **asked), world(rank, replicate=replicas)
    )


def test_the_file_is_what_scikit_learn_loads():
    from sklearn.datasets import load_digits

    images, labels = digits.read_digits()
    np.testing.assert_array_equal(images[:, 0], load_digits().images)
    np.testing.assert_array_equal(labels, load_digits().target)


def test_a_stratified_third_is_held_out():
    batches = opened(images_per_step=1)
    images, labels = (torch.cat(parts) for parts in zip(*batches.test(), strict=True))

    assert (batches.num_train, batches.num_test) == (1198, 599) == (1198, len(images))
    counts = torch.bincount(labels)
    all_counts = np.bincount(digits.read_digits()[1])
    assert max(abs(counts.numpy() - all_counts / 3)) < 1


def test_training_images_have_mean_zero_and_unit_deviation():
    images = torch.cat([x for x, _ in opened(images_per_step=1).train(0)])

    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.double().std(correction=0)) - 1) < 1e-5


def test_batches_are_of_the_asked_size_shape_and_type():
    images, labels = next(opened(images_per_step=32, resolution_px=24).train(0))

    assert (images.shape, images.dtype) == ((32, 1, 24, 24), torch.float32)
    assert (labels.shape, labels.dtype) == ((32,), torch.int64)
    assert images.is_contiguous()


def test_resizing_keeps_a_flat_image_flat_and_the_right_way_up():
    ramp = torch.arange(8.0).reshape(1, 1, 8, 1).expand(1, 1, 8, 8)
    resized = digits.resize_bilinear(ramp, 16)

    assert bool((resized[..., 1:, :] >= resized[..., :-1, :]).all())
    torch.testing.assert_close(resized[..., 0], resized[..., -1])


def test_two_replicas_see_the_batch_of_one():
    whole, labels = next(opened(images_per_step=32).train(3))
    halves = [next(opened(rank, 2, images_per_step=32).train(3)) for rank in range(2)]

    assert torch.equal(whole, torch.cat([images for images, _ in halves]))
    assert torch.equal(labels, torch.cat([labels for _, labels in halves]))


def test_the_seed_changes_the_order_but_not_the_split():
    def held_out(seed: int) -> torch.Tensor:
        return torch.cat([images for images, _ in opened(seed=seed).test()])

    assert torch.equal(held_out(0), held_out(1))
    assert not torch.equal(next(opened(seed=0).train(0))[0], next(opened(seed=1).train(0))[0])


def test_a_batch_larger_than_the_data_is_refused():
    digits = choice("data", "digits")
    (reason,) = digits.conflicts(cell(digits, images_per_step=2048))

    require(
        reason,
        "`batch.images_per_step=2048` (`batch.scope=total`) 1198 `data=digits` `data=synthetic`",
    )
    assert not list(digits.conflicts(cell(digits, images_per_step=1198, epochs=1)))
