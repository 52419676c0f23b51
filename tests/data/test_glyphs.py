"""Letters and digits of matplotlib's fonts: the same images everywhere, test fonts unseen."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ImageFont

from tests.choices import choice
from tests.data.cells_and_worlds import cell, world
from vitsweep.data import glyphs
from vitsweep.errors import VitsweepError


def test_no_font_is_both_trained_on_and_tested_on() -> None:
    assert not set(glyphs.TRAIN_FONTS) & set(glyphs.TEST_FONTS)
    assert len(set(glyphs.CHARACTERS)) == 62


def test_the_same_glyph_gives_the_same_image_and_its_copies_differ() -> None:
    images, labels = glyphs.rendered(("DejaVuSans",), copies=2)
    again, _ = glyphs.rendered(("DejaVuSans",), copies=2)

    assert images.shape == (124, 32, 32)
    assert labels.tolist() == [label for label in range(62) for _ in range(2)]
    np.testing.assert_array_equal(images, again)
    assert np.abs(images[0].astype(int) - images[1].astype(int)).mean() > 5


def test_a_glyph_keeps_its_size_and_place_within_a_line() -> None:
    """Of upright drawings: an o is lower than an O, and a p reaches below the line of a P."""
    font = ImageFont.truetype(str(glyphs.font_file("DejaVuSans")), round(glyphs.FONT_PX))
    boxes = {c: glyphs._drawn(font, c).getbbox() for c in "oOpP"}

    assert all(box is not None for box in boxes.values())
    height = {c: box[3] - box[1] for c, box in boxes.items() if box}
    bottom = {c: box[3] for c, box in boxes.items() if box}
    assert height["o"] < 0.85 * height["O"]
    assert bottom["p"] > bottom["P"] + 10


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_file_of_images_is_rendered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(glyphs, "TRAIN_FONTS", ("DejaVuSans",))
    monkeypatch.setattr(glyphs, "TEST_FONTS", ("cmr10",))
    monkeypatch.setattr(glyphs, "TRAIN_COPIES", 1)
    monkeypatch.setattr(glyphs, "TEST_COPIES", 1)
    train, test = glyphs.glyphs(tmp_path)
    [kept] = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"not an archive")

    for split, first in zip(glyphs.glyphs(tmp_path), (train, test), strict=True):
        np.testing.assert_array_equal(split[0], first[0])
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert kept.stat().st_size == len(whole)


def test_a_missing_font_is_named() -> None:
    with pytest.raises(VitsweepError, match=r"Comic\.ttf, which is not there: `pip install matp"):
        glyphs.font_file("Comic")


def test_batches_are_normalised_and_hold_every_class_out_equally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(glyphs, "TRAIN_FONTS", ("DejaVuSans", "cmr10"))
    monkeypatch.setattr(glyphs, "TEST_FONTS", ("cmtt10",))
    batches = choice("data", "glyphs").open(cell(images_per_step=62, resolution_px=32), world())
    images, labels = next(batches.train(0))
    tested = torch.cat([found for _, found in batches.test()])

    assert (images.shape, images.dtype, labels.dtype) == (
        (62, 1, 32, 32),
        torch.float32,
        torch.int64,
    )
    assert abs(float(images.mean())) < 0.1
    assert torch.bincount(tested).tolist() == [glyphs.TEST_COPIES] * 62
    assert list((tmp_path / "vitsweep").glob("glyphs-*.npz"))
