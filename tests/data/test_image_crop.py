from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vitsweep.data.decoded_cache import Box, as_rgb, centre_box, cut, random_box


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
