"""Letters and digits of the fonts that matplotlib ships: harder than scikit-learn's digits, no download."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsweep.data.glyph_fonts import (
    CHARACTERS,
    SIDE_PX,
    TEST_COPIES,
    TEST_FONTS,
    TRAIN_COPIES,
    TRAIN_FONTS,
)
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, head_conflicts, image_count_conflicts

if TYPE_CHECKING:
    from vitsweep.world import World

NUM_TRAIN = len(CHARACTERS) * len(TRAIN_FONTS) * TRAIN_COPIES
NUM_TEST = len(CHARACTERS) * len(TEST_FONTS) * TEST_COPIES


@dataclass(frozen=True, kw_only=True)
class Glyphs(Data):
    """8,928 grey images of 32 x 32 px in 62 classes: A-Z, a-z and 0-9 in 21 fonts.

    The 1,488 held-out images are in six fonts of which nothing is trained on. How an image is turned,
    scaled, slanted, shifted and covered with noise depends on its glyph and number alone, not on
    `seed`. Pixels are normalised by mean and standard deviation of the training images and resized
    bilinearly to `batch.resolution_px`.
    """

    @property
    def num_channels(self) -> int:
        """Grey."""
        return 1

    @property
    def num_classes(self) -> int:
        """Letters of both cases, and digits."""
        return len(CHARACTERS)

    @property
    def native_resolution_px(self) -> int:
        """Side of a rendered image."""
        return SIDE_PX

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a dense head, and more images per step than an epoch has."""
        yield from head_conflicts(cell, "classify")
        yield from image_count_conflicts(cell, NUM_TRAIN, NUM_TEST, "`data=synthetic`")

    def split_sizes(self) -> tuple[int, int]:
        """All glyphs of the fonts to train on, and of the others."""
        return NUM_TRAIN, NUM_TEST

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Render the images, or read them where that was done before, and put them on the device."""
        from vitsweep.data.glyph_rendering import open_glyphs

        return open_glyphs(cell, world)
