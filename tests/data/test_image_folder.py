import logging
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.choices import choice
from tests.data.cells_and_worlds import cell, world
from tests.data.pictures import picture, truncate, write_folder
from vitsweep.data.image_loader import DEVIATION, MEAN
from vitsweep.errors import VitsweepError


def opened(root: Path, rank: int = 0, replicas: int = 1, num_workers: int = 0, **overrides):
    of_cell = ("images_per_step", "seed", "objective")
    asked = {k: overrides.pop(k) for k in of_cell if k in overrides}
    data = choice("data", "image_folder", folder=str(root), num_workers=num_workers, **overrides)
    asked = cell(data, resolution_px=16, replicas=replicas, **({"images_per_step": 8} | asked))
    return data.open(asked, world(rank, replicate=replicas))


def brightest(images: torch.Tensor) -> torch.Tensor:
    means = images * torch.tensor(DEVIATION).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    return means.mean((2, 3)).argmax(1)


def test_images_come_normalised_with_their_label(tmp_path):
    batches = opened(write_folder(tmp_path))
    images, labels = next(batches.train(0))

    assert (images.shape, images.dtype) == ((8, 3, 16, 16), torch.float32)
    assert images.is_contiguous()
    assert torch.equal(brightest(images), labels)
    assert len(list(batches.train(0))) == 3


def test_held_out_images_are_cut_at_the_centre_and_counted_once_over_replicas(tmp_path):
    root = write_folder(tmp_path)
    parts = [list(opened(root, rank, 2, images_per_step=4).test()) for rank in range(2)]

    assert len(parts[0]) == len(parts[1])
    labels = torch.cat([labels for part in parts for _, labels in part])
    assert torch.bincount(labels).tolist() == [3, 3, 3]
    images = torch.cat([images for part in parts for images, _ in part])
    assert len(images.flatten(1).unique(dim=0)) == 9
    assert torch.equal(brightest(images), labels)


def test_pixels_of_the_centre_are_those_of_the_file(tmp_path):
    images, _ = next(opened(write_folder(tmp_path), test_crop_share=16 / 30).test())

    expected = torch.from_numpy(np.array(picture(0, 0), dtype=np.float32))
    expected = expected[7:23, 12:28].permute(2, 0, 1) / 255
    expected = (expected - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    torch.testing.assert_close(images[0], expected, atol=1e-5, rtol=1e-5)


def test_cuts_follow_seed_epoch_and_image_alone(tmp_path):
    root = write_folder(tmp_path)
    whole = [x for x, _ in opened(root).train(4)]
    halves = [[x for x, _ in opened(root, rank, 2).train(4)] for rank in range(2)]

    for step, images in enumerate(whole):
        assert torch.equal(images, torch.cat([halves[0][step], halves[1][step]]))
    assert not torch.equal(whole[0], next(opened(root, seed=1).train(4))[0])
    assert not torch.equal(whole[0], next(opened(root).train(5))[0])


def test_an_objective_that_cuts_on_the_device_gets_whole_images_from_their_centre(tmp_path):
    root = write_folder(tmp_path)
    images, _ = next(opened(root, objective="lejepa").train(0))
    assert images.shape == (8, 3, 18, 18)  # 8/7 of 16 px
    later = torch.cat([x for x, _ in opened(root, objective="lejepa").train(7)])
    for image in images:  # in another order, and cut alike
        assert (later == image).flatten(1).all(1).sum() == 1


@pytest.mark.parametrize("epochs", [(0, 1, 2), (3, 3), (2, 0)])
def test_epochs_may_come_in_any_order(tmp_path, epochs):
    root = write_folder(tmp_path)
    batches = opened(root)
    for epoch in epochs:
        for (ours, _), (theirs, _) in zip(
            opened(root).train(epoch), batches.train(epoch), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_an_epoch_left_half_way_does_not_disturb_the_next(tmp_path):
    root = write_folder(tmp_path)
    batches = opened(root)
    half = batches.train(0)
    next(half)
    images, _ = next(batches.train(1))

    assert torch.equal(images, next(opened(root).train(1))[0])
    assert torch.equal(next(half)[0], list(opened(root).train(0))[1][0])


def test_an_epoch_may_begin_in_its_midst_and_the_next_one_follows_whole(tmp_path):
    root = write_folder(tmp_path)
    batches, whole = opened(root), [list(opened(root).train(epoch)) for epoch in range(2)]
    for epoch, first in ((0, 2), (1, 0), (1, 1)):
        rest = list(batches.train(epoch, first))
        assert len(rest) == 3 - first
        for (ours, _), (theirs, _) in zip(rest, whole[epoch][first:], strict=True):
            assert torch.equal(ours, theirs)


def test_a_batch_larger_than_the_folder_gives_an_empty_epoch(tmp_path):
    assert list(opened(write_folder(tmp_path), images_per_step=25).train(0)) == []


def test_grey_palette_and_transparent_images_become_rgb(tmp_path):
    root = write_folder(tmp_path, per_class=1)
    for mode in ("L", "P", "RGBA", "LA", "I;16"):
        Image.new(mode, (20, 20)).save(root / "train" / "ant" / f"{mode[0:2]}.png")
    Image.new("CMYK", (20, 20)).save(root / "train" / "ant" / "cmyk.jpg")

    batches = opened(root, images_per_step=9)
    assert len(next(batches.train(0))[0]) == 9
    assert not batches.damage["train"].found


def test_a_truncated_image_is_named_once_skipped_and_replaced(tmp_path, caplog):
    root = write_folder(tmp_path)
    broken = truncate(root / "train" / "bee" / "bee_1.jpg")
    batches = opened(root, max_damaged_share=0.05)
    with caplog.at_level(logging.WARNING):
        labels = [torch.cat([y for _, y in batches.train(epoch)]) for epoch in range(2)]

    assert [len(y) for y in labels] == [24, 24]
    named = [record.message for record in caplog.records if str(broken) in record.message]
    assert len(named) == 1
    assert "truncated" in named[0]
    assert named[0].endswith("skipped.")


def test_an_image_that_cannot_be_read_is_replaced_by_the_next_of_the_folder(tmp_path):
    root = write_folder(tmp_path)
    whole = next(opened(root, images_per_step=24).train(0))[1].bincount()
    last_of_ant = sorted((root / "train" / "ant").iterdir())[-1]
    truncate(last_of_ant)
    found = next(opened(root, images_per_step=24, max_damaged_share=0.05).train(0))[1].bincount()
    assert (found - whole).tolist() == [-1, 1, 0]


def test_a_damaged_held_out_image_is_left_out(tmp_path):
    root = write_folder(tmp_path)
    truncate(root / "val" / "ant" / "ant_1.jpg")
    labels = torch.cat([y for _, y in opened(root, max_damaged_share=0.2).test()])

    assert torch.bincount(labels).tolist() == [2, 3, 3]


def test_more_damage_than_allowed_ends_the_run(tmp_path):
    root = write_folder(tmp_path)
    truncate(root / "train" / "bee" / "bee_1.jpg")
    (root / "train" / "cat" / "cat_0.png").write_bytes(b"")
    batches = opened(root, images_per_step=24, max_damaged_share=0.05)

    told = r"^At least 2 of 24 images cannot be read, more than `data.max_damaged_share=0.05` allows: .*bee"
    with pytest.raises(VitsweepError, match=told):
        list(batches.train(0))


def test_the_damage_that_was_met_is_named(tmp_path):
    root = write_folder(tmp_path)
    damaged = sorted(map(str, map(truncate, root.glob("train/*/*_[1357].jpg"))))
    batches = opened(root, images_per_step=2, max_damaged_share=0.05)
    with pytest.raises(VitsweepError, match=r"\d of 24 images"):
        list(batches.train(0))
    assert 1 < len(batches.damaged) <= len(damaged)
    assert {*batches.damaged} <= {*damaged}


def test_a_folder_of_nothing_but_damage_ends_the_run(tmp_path):
    root = write_folder(tmp_path, per_class=2)
    for path in root.glob("train/*/*"):
        path.write_bytes(b"no image")

    with pytest.raises(VitsweepError, match=r"6 of 6 images"):
        list(opened(root, images_per_step=2, max_damaged_share=0.9).train(0))


def test_workers_deliver_what_the_rank_itself_would_read_and_then_end(tmp_path):
    root = write_folder(tmp_path)
    truncate(root / "train" / "bee" / "bee_1.jpg")
    batches = opened(root, num_workers=2, max_damaged_share=0.1, prefetch_batches=3)
    assert batches.prefetched == 6
    assert opened(root).prefetched == 0
    state = torch.get_rng_state()
    for ours, theirs in zip(
        opened(root, max_damaged_share=0.1).train(1), batches.train(1), strict=True
    ):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert list(batches.damage["train"].found) == [str(root / "train" / "bee" / "bee_1.jpg")]
    assert torch.equal(state, torch.get_rng_state())

    same_workers = {worker.pid for worker in multiprocessing.active_children()}
    second = batches.train(2)
    assert [len(next(second)[0]) for _ in range(3)] == [8, 8, 8]
    next(batches.train(3))
    assert {worker.pid for worker in multiprocessing.active_children()} == same_workers
    left_half_way = batches.train(4)
    next(left_half_way)
    assert len(next(batches.test())[0]) == 8
    batches.close()
    assert not multiprocessing.active_children()
    assert not list(left_half_way)


def be_a_rank(root: Path, told: Connection) -> None:
    batches = opened(root, num_workers=2)
    running = batches.train(0)
    next(running)
    told.send([worker.pid for worker in multiprocessing.active_children()])
    time.sleep(600)


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_rank_that_a_fork_server_started(tmp_path):
    here, there = multiprocessing.Pipe()
    rank = multiprocessing.get_context("forkserver").Process(
        target=be_a_rank, args=(write_folder(tmp_path), there)
    )
    rank.start()
    workers = here.recv()
    assert len(workers) == 2
    rank.kill()
    rank.join()

    deadline = time.monotonic() + 500  # they look every five seconds, later on a busy machine
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
