"""How an image of any format becomes pixels, and which part of it a training or test image."""

from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ATTEMPTS = 10
"""How often a random part is drawn before the centre is taken, as in torchvision."""


class Box(NamedTuple):
    """A crop in pixels of the image; edges may lie between pixels."""

    left: float
    top: float
    right: float
    bottom: float


def random_box(width: int, height: int, smallest_share: float, random: np.random.Generator) -> Box:
    """Draw a crop of `smallest_share` to 1 of the area with an aspect ratio of 3:4 to 4:3.

    The method of torchvision's RandomResizedCrop; an image too long for any of it gives its centre.
    """
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(smallest_share, 1.0)
        ratio = exp(random.uniform(log(3 / 4), log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = random.integers(width - w + 1), random.integers(height - h + 1)
            return Box(left, top, left + w, top + h)
    ratio = min(max(width / height, 3 / 4), 4 / 3)
    return _centred(width, height, min(width, height * ratio), min(height, width / ratio))


def centre_box(width: int, height: int, share: float) -> Box:
    """Return the centred square with `share` of the shorter side."""
    side = share * min(width, height)
    return _centred(width, height, side, side)


def _centred(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return Box(left, top, left + w, top + h)


def decode(path: str) -> Image.Image | str:
    """Return an image file as RGB, or why it cannot be read."""
    try:
        with Image.open(path) as file:
            return as_rgb(file)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
        return str(error) or type(error).__name__


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel; one grey channel of 16 bits keeps its range.

    Pillow's own `convert` clips 16 bits at 255, which turns nearly all pixels white. It gives such
    images the modes `I;16` (PNG, TIFF) and `I` (PGM).

    Raises:
        ValueError: the pixels are floats, whose range no file states.
    """
    if image.mode == "F":
        raise ValueError(
            "its pixels are floats, whose range is unknown: convert it to 8 or 16 bits"
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        high_bytes = np.clip(np.asarray(image), 0, 2**16 - 1) >> 8
        return Image.fromarray(high_bytes.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def cut(image: Image.Image, box: Box, side: int, mirrored: bool = False) -> NDArray[np.uint8]:
    """Crop an RGB image and resize it bilinearly to (side, side, 3)."""
    small = image.resize((side, side), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(small)
    return pixels[:, ::-1] if mirrored else pixels
