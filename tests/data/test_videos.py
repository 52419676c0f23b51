import torch

from tests.choices import choice
from tests.data.cells_and_worlds import cell, world
from vitsweep.data.digits import moving, open_moving_digits


def test_a_digit_moves_its_way_round_the_torus():
    sprite = torch.arange(1.0, 5).reshape(1, 1, 2, 2).expand(4, -1, -1, -1)
    starts, ways = torch.tensor([[3, 3]]).expand(4, -1), torch.arange(4)

    videos = moving(sprite, starts, ways, num_frames=3, side=4, step=1)

    assert videos.shape == (4, 1, 3, 4, 4)
    first = videos[:, :, :1]
    assert first[0, 0, 0].flatten().tolist() == [4, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 1]
    for video, (axis, by) in zip(videos, [(-1, 1), (-1, -1), (-2, 1), (-2, -1)], strict=True):
        for frame in (1, 2):
            assert torch.equal(video[:, frame], video[:, 0].roll(by * frame, axis))


def test_videos_are_those_of_the_seed_and_labels_need_space_and_time():
    data = choice("data", "moving_digits")
    batches = open_moving_digits(data, cell(resolution_px=16), world())
    again = open_moving_digits(data, cell(resolution_px=16), world())
    videos, _ = next(batches.train(0))

    assert videos.shape == (16, 1, 8, 16, 16)
    assert torch.equal(videos, next(again.train(0))[0])
    every = torch.cat([labels for _, labels in batches.train(0)])
    assert set(every.tolist()) == set(range(40))
    assert (batches.num_train, batches.num_test) == (1198, 599)


def test_synthetic_videos_have_the_shape_asked_for():
    data = choice("data", "synthetic_video", num_frames=4, num_distinct=3, num_train=32)
    videos, labels = next(data.open(cell(resolution_px=8), world()).train(0))
    assert videos.shape == (16, 3, 4, 8, 8)
    assert labels.shape == (16,)
