import torch

from tests.choices import choice
from tests.data.cells_and_worlds import cell, world
from tests.refusals import require

SMALL = {"num_train": 100, "num_test": 10, "num_distinct": 6}


def opened(name: str, rank: int = 0, replicas: int = 1, seed: int = 0, **overrides):
    data = choice("data", name, **SMALL, **overrides)
    asked = cell(images_per_step=8, resolution_px=16, replicas=replicas, seed=seed)
    return data.open(asked, world(rank, replicate=replicas))


def test_synthetic_images_have_the_asked_shape_and_come_round_again():
    batches = opened("synthetic", num_channels=5)
    images, labels = next(batches.train(0))

    assert (images.shape, images.dtype) == ((8, 5, 16, 16), torch.float32)
    assert (labels.dtype, int(labels.max()) < 1000) == (torch.int64, True)
    assert len(list(batches.train(0))) == 12
    assert len(images.flatten(1).unique(dim=0)) <= 6
    assert sum(len(x) for x, _ in batches.test()) == batches.num_test == 10


def test_replicas_share_a_global_batch():
    name = "synthetic"
    whole = next(opened(name).train(1))
    halves = [next(opened(name, rank, 2).train(1)) for rank in range(2)]

    for tensor, parts in zip(whole, zip(*halves, strict=True), strict=True):
        assert torch.equal(tensor, torch.cat(parts))


def test_the_seed_decides_the_images():
    name = "synthetic"
    assert torch.equal(next(opened(name).train(0))[0], next(opened(name).train(0))[0])
    assert not torch.equal(next(opened(name).train(0))[0], next(opened(name, seed=1).train(0))[0])


def test_too_few_images_are_refused():
    few = choice("data", "synthetic", num_train=4, num_test=1)
    reasons = list(few.conflicts(cell(few, replicas=2, epochs=1)))

    require(reasons[0], "`data.num_train` `data.num_test`")
    require(reasons[1], "`task=train` 1 `data=synthetic`")
