import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.choices import choice
from tests.data.cells_and_worlds import cell
from tests.data.pictures import CLASSES, write_folder
from tests.refusals import require
from vitsweep.data import folder_files
from vitsweep.data.folder_files import class_names, count_up_to, files
from vitsweep.errors import BadValueError


def folder_of(path: Path | None):
    return choice("data", "image_folder", folder=path and str(path))


def test_labels_are_the_sorted_names_of_the_class_folders(tmp_path):
    found = files(str(write_folder(tmp_path)), "train")

    assert folder_of(tmp_path).num_classes == 3
    assert found.classes == CLASSES
    assert len(found) == 24
    for index in range(24):
        path = Path(found.path(index))
        assert path.is_file()
        assert path.parent.name == CLASSES[found.labels[index]]


def test_other_files_hidden_files_and_upper_case_suffixes(tmp_path):
    write_folder(tmp_path, per_class=1)
    for name in ("notes.txt", ".hidden.jpg", "loud.JPEG"):
        (tmp_path / "train" / "bee" / name).touch()
    (tmp_path / "train" / ".cache").mkdir()

    found = files(str(tmp_path), "train")
    assert [Path(found.path(i)).name for i in range(len(found))] == [
        "ant_0.png",
        "bee_0.png",
        "loud.JPEG",
        "cat_0.png",
    ]


def test_a_thousand_cells_look_once(tmp_path, monkeypatch):
    write_folder(tmp_path)
    looks = []
    listing = folder_files._folders
    monkeypatch.setattr(folder_files, "_folders", lambda root: looks.append(root) or listing(root))
    data = folder_of(tmp_path)
    for _ in range(1000):
        assert data.num_classes == 3
        assert not list(data.conflicts(cell(data, images_per_step=24, epochs=1)))

    assert len(looks) == 3  # classes, train, val


def test_counting_stops_when_it_is_enough(tmp_path):
    write_folder(tmp_path)

    assert count_up_to(str(tmp_path), "train", 5) == 5
    assert count_up_to(str(tmp_path), "train", 500) == 24
    assert count_up_to(str(tmp_path), "no_such_split", 5) == 0


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (None, "needs `data.folder=PATH`"),
        (["missing"], "missing`"),
        ([], r"`train` \("),
        (["validation"], r"`train` \(.*validation\)"),
        (["train"], "holds no images"),
        (["train/ant"], "holds no images"),
    ],
)
def test_a_folder_that_is_none_is_a_sentence(tmp_path, folders, told):
    for name in folders or []:
        if name != "missing":
            (tmp_path / name).mkdir(parents=True)
    root = None if folders is None else tmp_path / "missing" if "missing" in folders else tmp_path

    with pytest.raises(BadValueError, match=told):
        _ = folder_of(root).num_classes


def test_a_class_without_images_to_train_on_is_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train" / "dog").mkdir()

    with pytest.raises(BadValueError, match="`train/dog`"):
        _ = folder_of(tmp_path).num_classes


def test_a_held_out_class_that_was_never_trained_is_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "val" / "dog").mkdir()

    with pytest.raises(BadValueError, match=r"`val/dog`.*`train`"):
        files(str(tmp_path), "val")


def test_held_out_images_without_classes_are_an_error_and_none_at_all_are_not(tmp_path):
    class_names(str(write_folder(tmp_path, held_out=0)))
    assert len(files(str(tmp_path), "val")) == 0
    files.cache_clear()

    for name in CLASSES:
        (tmp_path / "val" / name).rmdir()
    (tmp_path / "val" / "1.jpg").touch()
    with pytest.raises(BadValueError, match="`val`"):
        files(str(tmp_path), "val")


def test_too_few_images_are_refused(tmp_path):
    data = folder_of(write_folder(tmp_path, held_out=0))
    batch, test = data.conflicts(cell(data, images_per_step=32, epochs=1))

    assert "`data=image_folder`" in batch
    require(batch, "`data.folder`")
    require(test, "`task=train` 0")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything: become somebody else for a while."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_that_cannot_be_read_is_named(tmp_path, split):
    write_folder(tmp_path)
    for path in (tmp_path, *tmp_path.parents):
        if path.name.startswith(("test_", "popen-", "pytest-")):  # pytest's, closed to others
            path.chmod(0o755)
    closed = tmp_path / split / "bee"
    closed.chmod(0o300)
    try:
        with (
            as_nobody(),
            pytest.raises(BadValueError, match=r"bee`.*`chmod -R a\+rX"),
        ):
            files(str(tmp_path), split)
    finally:
        closed.chmod(0o755)
