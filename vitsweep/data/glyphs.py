"""Letters and digits of the fonts that matplotlib ships: harder than scikit-learn's digits, no download."""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from io import BytesIO
from math import cos, radians, sin
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from vitsweep.data.digits import resize_bilinear
from vitsweep.errors import VitsweepError
from vitsweep.files import cache_folder, write_cache_file
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, head_conflicts, image_count_conflicts

if TYPE_CHECKING:
    from PIL import Image, ImageFont

    from vitsweep.data.batches import DeviceBatches
    from vitsweep.world import World

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
"""A label is an index into it."""
TRAIN_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic",
    "STIXGeneral", "STIXGeneralBol", "cmb10", "cmr10", "cmss10",
)  # fmt: skip
TEST_FONTS = (
    "DejaVuSansMono-BoldOblique", "DejaVuSerif-BoldItalic",
    "STIXGeneralItalic", "STIXGeneralBolIta", "cmti10", "cmtt10",
)  # fmt: skip
"""Fonts of which no glyph is trained on."""
TRAIN_COPIES, TEST_COPIES = 8, 4
"""Distorted images of each glyph of each font."""
SIDE_PX = 32
NUM_TRAIN = len(CHARACTERS) * len(TRAIN_FONTS) * TRAIN_COPIES
NUM_TEST = len(CHARACTERS) * len(TEST_FONTS) * TEST_COPIES

OVERSAMPLING = 4
"""A glyph is drawn and distorted at this multiple of the final side, then averaged down."""
FONT_PX = 0.72 * SIDE_PX * OVERSAMPLING
"""Size of the em: all characters keep their relative sizes, so that c and C differ."""
MOST_DEGREES, MOST_SLANT, MOST_SHIFT = 10.0, 0.1, 0.05
"""Rotation either way; shear of x per y; shift as a share of the side."""
SCALES, CONTRASTS, BRIGHTNESSES = (0.85, 1.15), (0.5, 0.9), (0.0, 0.1)
NOISE = 0.06
"""Standard deviation of Gaussian noise on pixels between 0 and 1."""
VERSION = 1
"""Raised where the rendering changes, so that images rendered before are not used any more."""

Split = tuple[NDArray[np.uint8], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Glyphs(Data):
    """8,928 grey images of 32 x 32 px in 62 classes: A-Z, a-z and 0-9 in 21 fonts.

    The 1,488 held-out images are in six fonts of which nothing is trained on. How an image is turned,
    scaled, slanted, shifted and covered with noise depends on its glyph and number alone, not on
    `seed`. Pixels are normalised by mean and standard deviation of the training images and resized
    bilinearly to `batch.resolution_px`.
    """

    num_channels: ClassVar[int] = 1  # grey
    native_resolution_px: ClassVar[int] = SIDE_PX  # side of a rendered image

    @property
    def num_classes(self) -> int:
        """Letters of both cases, and digits."""
        return len(CHARACTERS)

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a dense head, and more images per step than an epoch has."""
        yield from head_conflicts(cell, "classify")
        yield from image_count_conflicts(cell, NUM_TRAIN, NUM_TEST, "`data=synthetic`")

    def split_sizes(self) -> tuple[int, int]:
        """All glyphs of the fonts to train on, and of the others."""
        return NUM_TRAIN, NUM_TEST

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Render the images, or read them where that was done before, and put them on the device."""
        return open_glyphs(cell, world)


def open_glyphs(cell: CellSpec, world: "World") -> "DeviceBatches":
    """Return batches of glyphs on this rank's device."""
    import torch

    from vitsweep.data.batches import DeviceBatches, Images, ReplicaSampler

    train, test = glyphs()
    pixels = train[0].astype(np.float32)
    mean, deviation = float(pixels.mean()), float(pixels.std())

    def on_device(split: Split) -> Images:
        images = (split[0].astype(np.float32)[:, None] - mean) / deviation
        labels = torch.from_numpy(split[1]).to(world.device)
        return Images(torch.from_numpy(images).to(world.device), labels, len(labels))

    resize = partial(resize_bilinear, side=cell.batch.resolution_px)
    return DeviceBatches(on_device(train), on_device(test), ReplicaSampler.of(cell, world), resize)


def glyphs(cache: Path | None = None) -> tuple[Split, Split]:
    """Return training and held-out images (N, 32, 32) with labels (N,).

    They are kept in a cache file; one that cannot be read counts as missing.

    Args:
        cache: folder of the file; that of `files` by default.

    Raises:
        VitsweepError: the fonts are not where matplotlib keeps them.
    """
    path = (cache or cache_folder()) / f"glyphs-{_key()}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, BadZipFile), path.open("rb") as file:
        kept = np.load(file)
        parts = [kept[name] for name in ("train", "train_labels", "test", "test_labels")]
        return (parts[0], parts[1]), (parts[2], parts[3])
    train, test = rendered(TRAIN_FONTS, TRAIN_COPIES), rendered(TEST_FONTS, TEST_COPIES)
    _keep(path, train, test)
    return train, test


def rendered(fonts: tuple[str, ...], copies: int) -> Split:
    """Render `copies` distorted images of every character in each of the fonts.

    Returns:
        Images (N, 32, 32), white on black, and labels (N,), font by font.

    Raises:
        VitsweepError: a font is missing.
    """
    from PIL import ImageFont

    images, labels = [], []
    for font in fonts:
        shapes = ImageFont.truetype(str(font_file(font)), round(FONT_PX))
        for label, character in enumerate(CHARACTERS):
            drawn = _drawn(shapes, character)
            for copy in range(copies):
                digest = hashlib.sha256(f"{VERSION} {font} {character} {copy}".encode()).digest()
                generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
                images.append(_distorted(drawn, generator))
                labels.append(label)
    return np.stack(images), np.array(labels, dtype=np.int64)


def font_file(name: str) -> Path:
    """Return the file of a font, without importing matplotlib, which takes half a second.

    Raises:
        VitsweepError: matplotlib is not installed, or does not ship the font.
    """
    package = find_spec("matplotlib")
    roots = package.submodule_search_locations if package else None
    path = Path(roots[0] if roots else "", "mpl-data", "fonts", "ttf", f"{name}.ttf")
    if not path.is_file():
        raise VitsweepError(
            f"`data=glyphs` draws matplotlib's font {path.name}, which is not there: "
            "`pip install matplotlib`, or use `data=digits`."
        )
    return path


def _drawn(font: "ImageFont.FreeTypeFont", character: str) -> "Image.Image":
    """Draw a character on its baseline, so that p and P keep their heights, in the middle of the image."""
    from PIL import Image, ImageDraw

    side = SIDE_PX * OVERSAMPLING
    image = Image.new("L", (side, side))
    at = (side / 2, 0.70 * side)
    ImageDraw.Draw(image).text(at, character, fill=255, font=font, anchor="ms")
    return image


def _distorted(image: "Image.Image", generator: np.random.Generator) -> NDArray[np.uint8]:
    from PIL import Image

    side = image.width
    angle = radians(generator.uniform(-MOST_DEGREES, MOST_DEGREES))
    slant, scale = generator.uniform(-MOST_SLANT, MOST_SLANT), generator.uniform(*SCALES)
    shift = generator.uniform(-MOST_SHIFT, MOST_SHIFT, 2) * side
    # Pillow wants the way back: from a place in the result to the place it is taken from.
    turned = np.array([[cos(angle), sin(angle)], [-sin(angle), cos(angle)]]) / scale
    back = np.array([[1.0, slant], [0.0, 1.0]]) @ turned
    middle = np.full(2, side / 2)
    origin = middle - back @ (middle + shift)
    coefficients = (*back[0], origin[0], *back[1], origin[1])
    moved = image.transform((side, side), Image.Transform.AFFINE, coefficients,
                            Image.Resampling.BILINEAR)  # fmt: skip
    pixels = np.asarray(moved.reduce(OVERSAMPLING), dtype=np.float64) / 255
    pixels = generator.uniform(*BRIGHTNESSES) + generator.uniform(*CONTRASTS) * pixels
    pixels += generator.normal(0, NOISE, pixels.shape)
    return np.clip(255 * pixels, 0, 255).astype(np.uint8)


def _key() -> str:
    """Name what decides the pixels: this code's version, and the libraries that hold and draw the fonts."""
    return f"{VERSION}-{version('matplotlib')}-{version('pillow')}"


def _keep(path: Path, train: Split, test: Split) -> None:
    content = BytesIO()
    np.savez_compressed(
        content, train=train[0], train_labels=train[1], test=test[0], test_labels=test[1]
    )
    write_cache_file(path, content.getvalue())
