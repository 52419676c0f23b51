"""Small real image files in ImageNet's layout."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def write_folder(root: Path, per_class: int = 8, held_out: int = 3) -> Path:
    for split, count in (("train", per_class), ("val", held_out)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                suffix = "jpg" if index % 2 else "png"
                path = root / split / name / f"{name}_{index}.{suffix}"
                picture(label, index).save(path)
    return root


def picture(label: int, index: int) -> Image.Image:
    """A noisy picture of 40 x 30 px whose brightest channel is its label."""
    random = np.random.default_rng((label, index))
    pixels = random.integers(0, 80, (30, 40, 3), dtype=np.uint8)
    pixels[..., label] += 150
    return Image.fromarray(pixels)


def truncate(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path
