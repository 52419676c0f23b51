"""A look before the first cell: too much damage is one refusal that names each file."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image

from tests.cells import THIS_LAPTOP, cell
from tests.choices import choice
from tests.data.pictures import CLASSES
from tests.refusals import named
from vitsweep.cli import main
from vitsweep.data import folder_look
from vitsweep.data.damaged_images import read_damaged
from vitsweep.data.decoded_cache import size_and_time
from vitsweep.data.folder_look import Look, _has_both_ends, _key, _look_at, check_images
from vitsweep.errors import BadValueError

SUFFIXES = ("jpg", "png", "webp", "bmp", "tif")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """1,000 small images of all formats."""
    random = np.random.default_rng(0)
    for split, num in (("train", 999), ("val", 1)):
        for name in CLASSES:
            (tmp_path / "set" / split / name).mkdir(parents=True)
        for index in range(num):
            path = tmp_path / "set" / split / CLASSES[index % 3] / f"{index}.{SUFFIXES[index % 5]}"
            Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    return tmp_path / "set"


def spec(root: Path, *more: str):
    folder = ("data=image_folder", f"data.folder={root}", "batch.resolution_px=8")
    return cell(*folder, "model.patch_px=4", *more, machine=THIS_LAPTOP)


def damage(path: Path, how: int) -> None:
    content = path.read_bytes()
    if how == 0:
        path.write_bytes(b"")
    elif how == 1:
        path.write_bytes(content[: len(content) // 2])
    elif how == 2:
        path.write_bytes(b"<html>not found</html>")
    else:
        path.write_bytes(bytes(len(content)))  # as some file systems leave a file after a crash


def damage_20(root: Path) -> list[Path]:
    chosen = [path for path in sorted(root.glob("train/*/*")) if path.suffix != ".tif"][::40][:20]
    for index, path in enumerate(chosen):
        damage(path, index % 4)
    return chosen


def test_20_damaged_of_1000_images_are_one_refusal_and_one_list(root: Path, tmp_path: Path) -> None:
    asked = spec(root)
    assert not list(check_images([asked], tmp_path))
    chosen = damage_20(root)
    with pytest.raises(BadValueError) as refused:
        list(check_images([asked, asked], tmp_path))
    said = str(refused.value)
    assert all(name in said for name in ("`train`", "`data.max_damaged_share=0.001`"))
    for path in chosen:
        assert str(path.relative_to(root / "train")) in said
    assert set(read_damaged(tmp_path)) == set(map(str, chosen))

    [said] = check_images([spec(root, "data.max_damaged_share=0.05")], tmp_path)
    assert {"20", "999", "`train`"} <= named(said)
    for path in chosen[:10]:
        path.unlink()
    for path in chosen[10:]:
        Image.new("RGB", (8, 8)).save(path)
    assert not list(check_images([asked], tmp_path))
    assert not read_damaged(tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Some images of three classes."""
    for split in ("train", "val"):
        for name in CLASSES:
            (tmp_path / "few" / split / name).mkdir(parents=True)
            for index in range(40):
                path = tmp_path / "few" / split / name / f"{index}.png"
                Image.new("RGB", (8, 8)).save(path)
    return tmp_path / "few"


def test_what_is_not_read_is_counted_by_its_kind(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a plan; the same cells get the same images."""
    before = [*folder_look.files.__wrapped__(str(small), "train").names]
    assert not list(check_images([spec(small)], tmp_path))
    for place in ("ant/more", "ant/more/yet", "ant/.hidden"):
        (small / "train" / place).mkdir()
        Image.new("RGB", (8, 8)).save(small / "train" / place / "a.png")
    for name in ("ant/a.ppm", "bee/b.PPM", "bee/README", "stray.jpg", "ant/._1.png", ".stray.jpg"):
        (small / "train" / name).write_bytes(b"")
    (small / "val" / "unread.ppm").write_bytes(b"")
    [said] = check_images([spec(small)], tmp_path)
    for words in ("6 files of `train`", "2 .ppm", "2 in deeper folders", "1 beside the class folders",
                  "1 without an ending", "`train/<class>/`"):  # fmt: skip
        assert words in said
    assert [*folder_look.files.__wrapped__(str(small), "train").names] == before
    assert [*folder_look.reading_notes([spec(small)], -1.0)] == []
    in_sweep = "batch.resolution_px=8 model.patch_px=4 batch.images_per_step=8".split()
    main.run(["plan", "--no-predict", "data=image_folder", f"data.folder={small}", *in_sweep])
    assert "6 files of `train`" in " ".join(capsys.readouterr().out.split())


def test_rotations_and_forms_of_unicode_are_said(small: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for name in ("1", "2"):
        Image.new("RGB", (8, 8)).save(small / "train" / "ant" / f"{name}.png", exif=exif)
    [said] = folder_look.reading_notes([spec(small)])
    assert "2 of 120 images of `train`" in said
    assert "EXIF" in said
    composed, apart = "caf\u00e9", "cafe\u0301"
    (small / "train" / "bee").rename(small / "train" / composed)
    (small / "val" / "bee").rename(small / "val" / apart)
    folder_look.class_names.cache_clear()
    with pytest.raises(BadValueError, match="NFC"):
        folder_look.files.__wrapped__(str(small), "val")
    shutil.copytree(small / "train" / composed, small / "train" / apart)
    folder_look.class_names.cache_clear()
    assert any("NFC" in said for said in folder_look.reading_notes([spec(small)]))


def test_a_file_with_other_ends_that_can_be_decoded_is_whole(root: Path, tmp_path: Path) -> None:
    for path in sorted(root.glob("train/ant/*")):
        path.write_bytes(path.read_bytes() + b"a camera's own bytes")
    (jpg := next(root.glob("train/bee/*.jpg"))).rename(jpg.with_suffix(".png"))
    assert not list(check_images([spec(root)], tmp_path))


def test_held_out_images_count_where_they_are_read(root: Path, tmp_path: Path) -> None:
    damage(next(root.glob("val/*/*")), 1)
    assert not list(check_images([spec(root)], tmp_path))
    with pytest.raises(BadValueError, match="1 of 1 images of `val`"):
        list(check_images([spec(root, "task=train", "task.epochs=1")], tmp_path))


def test_files_are_read_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    ends = folder_look._has_both_ends
    monkeypatch.setattr(folder_look, "_has_both_ends", lambda p: read.append(p) or ends(p))
    list(check_images([spec(root)], tmp_path))
    assert len(read) == 999
    changed = next(root.glob("train/ant/*.png"))
    Image.new("RGB", (9, 9)).save(changed)
    list(check_images([spec(root)], tmp_path))
    assert read[999:] == [str(changed)]


def test_a_screening_run_ends_in_time_and_the_next_goes_on(root: Path, tmp_path: Path) -> None:
    damage_20(root)
    found = folder_look.files(str(root), "train")
    assert folder_look.look(found, time.monotonic() - 1).num_looked == 0
    begun = folder_look.look(found, time.monotonic() + 0.01)
    assert "at least" in begun.share or begun.num_looked == 999
    folder_look.look(found, time.monotonic() - 1)  # loses nothing of what is kept
    whole = folder_look.look(found, time.monotonic() + 500)
    assert (whole.num_looked, whole.share) == (999, "20 of 999 images of `train`")


def test_what_decoding_found_is_known_to_the_next_command(root: Path, tmp_path: Path) -> None:
    hidden = next(root.glob("train/ant/*.png"))
    content = bytearray(hidden.read_bytes())
    content[45:60] = bytes(15)  # inside of the pixels
    hidden.write_bytes(content)
    assert not list(check_images([spec(root)], tmp_path))
    folder_look.write_damaged(tmp_path, {str(hidden): "broken PNG file"})
    [said] = check_images([spec(root, "data.max_damaged_share=0.01")], tmp_path)
    assert "1 of 999 images of `train`" in said


def test_a_split_may_lose_its_share_of_images_and_no_more() -> None:
    data = choice("data", "image_folder", folder="there", max_damaged_share=0.05)
    for images, damaged, is_told in (
        (100, 5, False),
        (100, 6, True),
        (99, 4, False),
        (99, 5, True),
    ):
        paths = {f"/set/train/a/{index:02}.jpg": "short" for index in range(damaged)}
        seen = Look("/set/train", images, images, paths)
        assert bool(seen.problem(data, " there")) is is_told
        assert seen.share.split()[:3] == [str(damaged), "of", str(images)]
    for looked, least in ((99, ["at", "least", "5"]), (100, ["5", "of", "100"])):
        paths = {f"/set/train/a/{index:02}.jpg": "short" for index in range(5)}
        assert Look("/set/train", 100, looked, paths).share.split()[:3] == least


def test_at_most_twenty_images_are_named() -> None:
    data = choice("data", "image_folder", folder="there", max_damaged_share=0.0)
    for count, is_cut in ((20, False), (21, True)):
        paths = {f"/set/train/a/{index:02}.jpg": "short" for index in range(count)}
        told = Look("/set/train", 100, 100, paths).problem(data, "")
        assert told.count(".jpg") == 20
        assert ("19.jpg, ..." in told) is is_cut


def test_both_ends_of_a_file_are_those_of_one_format(tmp_path: Path) -> None:
    jpeg, png = (b"\xff\xd8\xff", b"\xff\xd9"), (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82")
    path = tmp_path / "a"
    for content, is_whole in (
        (jpeg[0] + bytes(40) + jpeg[1], True),
        (png[0] + bytes(40) + png[1], True),
        (png[0] + png[1], True),
        (jpeg[0] + jpeg[1], True),
        (jpeg[0] + bytes(40) + png[1], False),
        (jpeg[0] + bytes(40) + jpeg[1] + b"\0", False),
        (bytes(1) + jpeg[0] + bytes(40) + jpeg[1], False),
        (jpeg[0] + bytes(40), False),
        (b"", False),
    ):
        path.write_bytes(content)
        assert _has_both_ends(str(path)) is is_whole, content
    assert _has_both_ends(str(tmp_path / "none")) is False


def test_a_key_follows_name_size_and_time_of_change(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        path = tmp_path / name
        for content in (b"1", b"12"):
            path.write_bytes(content)
            for time_ns in (10**9, 2 * 10**9):
                os.utime(path, ns=(0, time_ns))
                keys.add(_key(str(path)))
    assert len(keys) == 8
    assert size_and_time(str(path)) == (2, 2 * 10**9)
    assert size_and_time(str(tmp_path / "none")) == (-1, -1)


def test_a_part_of_a_check_is_256_files_and_ends_with_the_time(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(b"")
    found = SimpleNamespace(path=lambda row: str(tmp_path / f"{row % 3}.png"))
    many = type("Found", (), {"path": staticmethod(found.path), "__len__": lambda _: 600})()
    known = {_key(str(tmp_path / "0.png"))}
    for first, count in ((0, 256), (256, 256), (512, 88)):
        whole, damaged = _look_at(many, known, float("inf"), (), first)
        assert len(whole) + 2 * count // 3 == pytest.approx(count, abs=1.1)
        assert sorted(Path(path).name for path in damaged) == ["1.png", "2.png"]
    assert _look_at(many, known, 0.0, (), 0) == ([], {})
    whole, damaged = _look_at(many, known, float("inf"), {str(tmp_path / "0.png")}, 512)
    assert (whole, len(damaged)) == ([], 3), "a suspect is decoded although it is known"
