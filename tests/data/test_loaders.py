"""Every loader gives the images of worker processes, in their order; decoded pixels are of these images."""

import os
import pickle
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cells import LAPTOP, TINY, entry
from tests.choices import choice
from tests.data.cells_and_worlds import cell, world
from tests.data.pictures import picture, truncate, write_folder
from vitsweep.data import decoded_cache as cache_module
from vitsweep.data.decoded_cache import DecodedImages
from vitsweep.data.folder_files import files
from vitsweep.errors import BadValueError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures")


def opened(root: Path, loader: Any = None, rank: int = 0, replicas: int = 1, **data: Any) -> Any:
    workers = {"num_workers": 0, "max_damaged_share": 0.2} | data
    chosen = choice("data", "image_folder", folder=str(root), **workers)
    asked = cell(
        chosen, images_per_step=8, resolution_px=16, replicas=replicas, epochs=1, loader=loader
    )
    return chosen.open(asked, world(rank, replicate=replicas))


def cached(folder: Path, **options: Any) -> Any:
    return choice("loader", "decoded_cache", folder=str(folder / "decoded"), **options)


def assert_same(ours: Any, theirs: Any) -> None:
    pairs = list(zip(ours, theirs, strict=True))
    assert pairs
    for (images, labels), (other_images, other_labels) in pairs:
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def test_a_loader_gives_what_worker_processes_give(root: Path) -> None:
    truncate(root / "train" / "bee" / "bee_1.jpg")
    truncate(root / "val" / "ant" / "ant_1.jpg")
    loader = cached(root.parent)
    for rank in range(2):
        plain = opened(root, rank=rank, replicas=2)
        ours = opened(root, loader, rank=rank, replicas=2)
        for epoch, first in ((0, 0), (1, 0), (1, 2), (0, 1)):
            assert_same(ours.train(epoch, first), plain.train(epoch, first))
        assert_same(ours.test(), plain.test())
        assert ours.damage == plain.damage
        assert ours.damage["train"].found
        ours.close()


def pixel_files(root: Path) -> list[Path]:
    return sorted((root.parent / "decoded").glob("*/pixels.bin"))


def test_images_are_decoded_once_for_all_that_open_them_at_the_same_time(root: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: opened(root, cached(root.parent)), range(4)))
    made = [path.stat().st_mtime_ns for path in pixel_files(root)]
    assert len(made) == 2  # train and val
    first, *others = [list(batches.train(0)) for batches in found]
    for other in others:
        assert_same(first, other)
    opened(root, cached(root.parent))
    assert [path.stat().st_mtime_ns for path in pixel_files(root)] == made
    assert {p.name for p in (root.parent / "decoded").iterdir() if p.is_dir()} == {
        path.parent.name for path in pixel_files(root)
    }


def removed(root: Path, split: str = "train") -> Path:
    """Remove the decoded images of a split, as a refusal tells."""
    [folder] = [path.parent for path in pixel_files(root) if split in str(path.parent)]
    shutil.rmtree(folder)
    return root.parent


def test_pixels_of_other_images_are_found_and_made_anew_where_they_are_removed(root: Path) -> None:
    opened(root, cached(root.parent))
    path = root / "train" / "cat" / "cat_1.jpg"
    picture(2, 99).save(path)
    told = r"files were added, removed or changed.*Remove that folder to decode anew"
    with pytest.raises(BadValueError, match=told):
        opened(root, cached(root.parent))
    assert_same(opened(root, cached(removed(root))).train(0), opened(root).train(0))

    path.unlink()
    for _ in range(2):
        with pytest.raises(BadValueError, match=r"`loader\.folder="):
            opened(root, cached(root.parent))
        files.cache_clear()


def overwrite(path: Path, content: bytes, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def zeros(path: Path) -> None:
    overwrite(path, bytes(path.stat().st_size), 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = [
    ("pixels.bin", zeros, "24 images of pixels.bin are not what was written"),
    ("pixels.bin", cut, r"pixels.bin has \d+ bytes, and \d+ were written"),
    ("pixels.bin", Path.unlink, "they cannot be read"),
    ("index.npz", cut, "are damaged"),
    ("index.npz", lambda path: path.write_bytes(b""), "are damaged"),
    ("facts.json", lambda path: path.write_text("[]"), "they cannot be read"),
    ("facts.json", lambda path: path.write_text('{"layout": 1}'), "another version of vitsweep"),
]


def test_damage_is_named_with_the_folder_to_remove(root: Path) -> None:
    opened(root, cached(root.parent))
    plain = list(opened(root).train(0))
    train = next(path.parent for path in pixel_files(root) if "train" in str(path))
    for name, damage, told in DAMAGE:
        damage(train / name)
        with pytest.raises(BadValueError, match=f"{train.name}.*{told}"):
            opened(root, cached(root.parent))
        shutil.rmtree(train)
        assert_same(opened(root, cached(root.parent)).train(0), plain)


def test_an_image_that_changes_after_the_check_is_named_when_it_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "SAMPLE", 2)
    opened(root, cached(root.parent))
    train = next(path.parent for path in pixel_files(root) if "train" in str(path))
    overwrite(train / "pixels.bin", b"other", (train / "pixels.bin").stat().st_size - 5)
    batches = opened(root, cached(root.parent))  # the last image is not among the sample
    with pytest.raises(BadValueError, match=r"image 23 of pixels\.bin"):
        list(batches.train(0))
    assert_same(opened(root, cached(removed(root))).train(0), opened(root).train(0))


def test_finished_pixels_are_read_without_writing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(root, cached(root.parent))
    for lock in (root.parent / "decoded").glob("*.lock"):
        lock.unlink()

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)  # root may write into a read-only folder
    monkeypatch.setattr(cache_module, "open", refused, raising=False)
    assert_same(opened(root, cached(root.parent)).train(0), opened(root).train(0))
    picture(2, 99).save(root / "train" / "cat" / "cat_1.jpg")
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "open", refused, raising=False)
    with pytest.raises(BadValueError, match=r"`loader\.folder="):
        opened(root, cached(root.parent))


def test_a_folder_that_is_a_file_is_named(root: Path) -> None:
    (root.parent / "decoded").write_text("mine")
    with pytest.raises(BadValueError, match="decoded`"):
        opened(root, cached(root.parent))


def test_what_killed_decodings_left_is_removed(root: Path) -> None:
    name = cache_module._name(files(str(root), "train"), None)
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    dead, alive, elsewhere = (
        root.parent / "decoded" / f"{name}.{tail}"
        for tail in (f"{host}-{ended.pid}", f"{host}-1", f"other{host}-{ended.pid}")
    )
    for path in (dead, alive, elsewhere):
        path.mkdir(parents=True)
    opened(root, cached(root.parent))
    assert [path.exists() for path in (dead, alive, elsewhere)] == [False, True, True]


def test_a_decoding_that_fails_half_way_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str) -> None:
        if path.endswith("cat_0.png"):
            raise OSError(28, "No space left on device")
        return decode(path)

    decode = cache_module.decode
    monkeypatch.setattr(cache_module, "decode", full)
    with pytest.raises(OSError, match="No space left"):
        opened(root, cached(root.parent))
    assert not pixel_files(root)
    monkeypatch.undo()
    assert_same(opened(root, cached(root.parent)).train(0), opened(root).train(0))


def test_kept_images_may_be_smaller_than_the_files(root: Path) -> None:
    batches = opened(root, cached(root.parent, shorter_side_px=20))
    assert len(next(batches.train(0))[0]) == 8
    kept = DecodedImages(next(p.parent for p in pixel_files(root) if "train" in str(p)))
    image = pickle.loads(pickle.dumps(kept)).image(0)
    assert isinstance(image, Image.Image)
    assert image.size == (27, 20)
    assert all(path.stat().st_size % (27 * 20 * 3) == 0 for path in pixel_files(root))
    assert os.listdir(root.parent / "decoded")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ["loader=decoded_cache"],
            "`data=digits`",
        ),
        (["loader=decoded_cache"], "use `data=image_folder`, or `loader=workers`."),
        (
            ["loader=decoded_cache", "loader.shorter_side_px=6"],
            "`loader.shorter_side_px=6` is less than `batch.resolution_px=8`",
        ),
    ],
)
def test_a_loader_says_what_it_cannot_read(overrides: list[str], part: str) -> None:
    assert part in " ".join(entry(*TINY, *overrides, machine=LAPTOP).reasons)


def test_a_table_says_how_many_images_steps_need_that_wait_for_them() -> None:
    row = {"data.folder": "imagenet", "step_time_ms": 100.0, "images_per_second_per_rank": 400.0}
    note = type(choice("loader", "workers")).note
    told = note(row | {"data_wait_ms": 50.0})
    assert "400 images/s" in told
    assert "800 are needed" in told
    assert not note(row | {"data_wait_ms": 4.0})
    assert not note(row | {"data_wait_ms": 50.0, "data.folder": None})
    assert not note(row | {"data_wait_ms": float("nan")})
