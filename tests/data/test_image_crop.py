from io import BytesIO
from math import log
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from vitsweep.data.decoded_cache import (
    Box,
    _name,
    _pixels,
    as_rgb,
    centre_box,
    cut,
    random_box,
)


def boxes(width: int, height: int, smallest_share: float = 0.08, count: int = 500) -> list[Box]:
    random = np.random.default_rng(0)
    return [random_box(width, height, smallest_share, random) for _ in range(count)]


def test_random_parts_lie_inside_and_keep_share_and_ratio():
    for left, top, right, bottom in boxes(500, 375):
        w, h = right - left, bottom - top
        assert 0 <= left < right <= 500
        assert 0 <= top < bottom <= 375
        assert 0.99 * 0.08 <= w * h / (500 * 375) <= 1
        assert 0.98 * 3 / 4 <= w / h <= 1.02 * 4 / 3


def test_random_parts_reach_every_corner():
    found = boxes(100, 100)

    assert min(b.left for b in found) == min(b.top for b in found) == 0
    assert max(b.right for b in found) == max(b.bottom for b in found) == 100


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000), (1, 1)])
def test_an_image_too_long_for_any_ratio_gives_its_centre(width, height):
    for box in boxes(width, height, smallest_share=1.0, count=3):
        assert box.left + box.right == pytest.approx(width)
        assert box.top + box.bottom == pytest.approx(height)
        assert (box.right - box.left) / (box.bottom - box.top) in (
            pytest.approx(4 / 3),
            pytest.approx(3 / 4),
            pytest.approx(1),
        )


def test_the_centre_keeps_its_share_of_the_shorter_side():
    assert centre_box(400, 256, 0.875) == (88, 16, 312, 240)


def test_cutting_scales_and_mirrors():
    ramp = Image.fromarray(np.arange(0, 240, 10, dtype=np.uint8)[None].repeat(24, 0)).convert("RGB")
    plain = cut(ramp, Box(4, 4, 20, 20), 8)
    mirrored = cut(ramp, Box(4, 4, 20, 20), 8, mirrored=True)

    assert plain.shape == (8, 8, 3)
    assert bool((np.diff(plain[0, :, 0].astype(int)) > 0).all())
    np.testing.assert_array_equal(mirrored, plain[:, ::-1])
    assert 40 <= plain.min() <= plain.max() <= 190


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_images_of_16_bits_keep_their_range(kind):
    grey = np.linspace(0, 2**16 - 1, 64 * 64).reshape(64, 64).astype(np.uint16)
    file = BytesIO()
    Image.fromarray(grey).save(file, kind)

    pixels = np.asarray(as_rgb(Image.open(file)))
    assert pixels.shape == (64, 64, 3)
    assert (pixels == (grey // 256)[..., None]).all()


def test_pixels_that_are_floats_are_refused():
    with pytest.raises(ValueError, match=r"\b8 or 16 bits"):
        as_rgb(Image.fromarray(np.zeros((2, 2), np.float32)))


class Script:
    """A generator whose numbers are given, and which notes what was asked of it."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.asked = iter(numbers), list[tuple[float, ...]]()

    def uniform(self, low: float, high: float) -> float:
        self.asked.append((low, high))
        return next(self.numbers)

    def integers(self, high: int) -> int:
        self.asked.append((high,))
        return int(next(self.numbers))


def test_a_random_part_is_drawn_until_it_fits_and_ten_times_at_most():
    ratio = (log(3 / 4), log(4 / 3))
    random = Script(0.25, 0.0, 7, 3)
    assert random_box(200, 100, 0.08, random) == (7, 3, 78, 74)  # sqrt(5000) = 70.7
    assert random.asked == [(0.08, 1.0), ratio, (130,), (30,)]
    random = Script(1.0, log(4 / 3), 0.5, log(4 / 3), 1, 2)
    assert random_box(100, 100, 0.5, random) == (1, 2, 83, 63)  # 115 x 87, then 82 x 61
    assert random.asked == 2 * [(0.5, 1.0), ratio] + [(19,), (40,)]
    random = Script(1.0, 0.0, 0, 0)
    assert random_box(90, 90, 1.0, random) == (0, 0, 90, 90)
    never = Script(*(10 * [1.0, 0.0]))
    assert random_box(400, 100, 1.0, never) == pytest.approx((133.333, 0, 266.667, 100), abs=1e-3)
    assert len(never.asked) == 20
    narrow = Script(*(10 * [1.0, 0.0]))
    assert random_box(100, 400, 1.0, narrow) == pytest.approx((0, 133.333, 100, 266.667), abs=1e-3)
    thin = Script(*(10 * [1e-6, 0.0]))
    assert random_box(100, 110, 1.0, thin) == (0, 0, 100, 110), "less than a pixel never fits"


def test_grey_values_beyond_16_bits_are_clipped():
    grey = Image.fromarray(np.array([[-5, 0], [70_000, 2**16 - 1]], dtype=np.int32))
    assert np.asarray(as_rgb(grey))[..., 0].tolist() == [[0, 0], [255, 255]]


def test_files_are_shrunk_to_a_shorter_side_and_never_grown(tmp_path):
    path = str(tmp_path / "a.png")
    Image.new("RGB", (31, 20)).save(path)
    for shorter, shape in ((None, (20, 31)), (20, (20, 31)), (21, (20, 31)), (10, (10, 16))):
        assert _pixels(path, shorter).shape == (*shape, 3)
    assert isinstance(_pixels(str(tmp_path / "none.png"), 10), str)


def test_a_folder_of_pixels_is_named_by_split_and_size(tmp_path):
    def named(folder: str, side: int | None = None) -> str:
        return _name(SimpleNamespace(folder=str(tmp_path / folder)), side)

    assert named("own/train").startswith("own-train-allpx-")
    assert named("own/train", 64).startswith("own-train-64px-")
    assert len(named("own/train").rpartition("-")[2]) == 8
    assert named("a/own/train") != named("b/own/train")
