import numpy as np
import pytest

from tests.data.cells_and_worlds import cell, world
from vitsweep.data.batches import ReplicaSampler


def shares(
    replicas: int, accumulation_steps: int = 1, micro_batch: int = 4
) -> list[ReplicaSampler]:
    return [
        ReplicaSampler(
            replica=replica,
            replicas=replicas,
            micro_batch=micro_batch,
            accumulation_steps=accumulation_steps,
            seed=7,
        )
        for replica in range(replicas)
    ]


def global_batches(num_images: int, epoch: int, replicas: int, accumulation_steps: int) -> list:
    parts = shares(replicas, accumulation_steps, 24 // (replicas * accumulation_steps))
    orders = [part.train(num_images, epoch) for part in parts]
    assert len({order.shape for order in orders}) == 1
    steps = len(orders[0]) // accumulation_steps
    return [np.concatenate(np.split(order, steps)[i]) for i in range(steps) for order in orders]


@pytest.mark.parametrize(
    ("replicas", "accumulation_steps"), [(1, 3), (2, 1), (4, 1), (4, 2), (3, 4)]
)
def test_global_batches_do_not_depend_on_replicas_or_accumulation(replicas, accumulation_steps):
    plain = np.concatenate(global_batches(100, 2, 1, 1))
    split = np.concatenate(global_batches(100, 2, replicas, accumulation_steps))

    np.testing.assert_array_equal(plain, split)


def test_an_epoch_drops_the_remainder_and_repeats_no_image():
    order = shares(1, micro_batch=32)[0].train(100, epoch=0)

    assert order.shape == (3, 32)
    assert len(np.unique(order)) == 96


def test_the_order_follows_seed_and_epoch():
    (share,) = shares(1)

    assert not np.array_equal(share.train(40, 0), share.train(40, 1))
    np.testing.assert_array_equal(share.train(40, 1), share.train(40, 1))


def test_every_held_out_image_is_on_one_replica_and_all_have_as_many_batches():
    for replicas in [1, 2, 3, 7]:
        for micro_batch in [1, 2, 5, 64]:
            for num_images in [0, 7, 8, 60, 61, 599]:
                batches = [
                    list(s.test(num_images)) for s in shares(replicas, micro_batch=micro_batch)
                ]

                seen = np.concatenate([np.concatenate([*b, []]) for b in batches])
                np.testing.assert_array_equal(np.sort(seen), np.arange(num_images))
                assert len({len(b) for b in batches}) == 1
                assert all(0 < len(indices) <= micro_batch + 1 for b in batches for indices in b)


def test_ranks_that_share_an_image_have_one_share():
    mesh = {"replicate": 2, "shard": 2, "tensor": 2, "pipeline": 2}
    found = [ReplicaSampler.of(cell(replicas=4), world(rank, **mesh)).replica for rank in range(16)]

    assert found == [0, 0, 1, 1, 2, 2, 3, 3] * 2
