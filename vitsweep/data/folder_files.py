"""What lies in a folder of images in ImageNet's layout: its classes and files, as their names say."""

import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.errors import BadValueError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp")


@dataclass(frozen=True, eq=False)
class Files:
    """The images of one split, by class and name.

    Names are one array of bytes: a million Python strings would cost each worker 100 MB and the
    start of it a second.

    Attributes:
        folder: of the split.
        classes: names of the class folders; a label is an index into it.
        names: file names, (N,) bytes.
        labels: (N,) int64.
    """

    folder: str
    classes: tuple[str, ...]
    names: "NDArray[np.bytes_]"
    labels: "NDArray[np.int64]"

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Return the path of one image."""
        return os.path.join(
            self.folder, self.classes[self.labels[index]], os.fsdecode(self.names[index])
        )


@cache
def class_names(folder: str | None) -> tuple[str, ...]:
    """Return the names of the class folders in `train/`, sorted: a label is an index into it.

    Kept for the life of the process: a sweep asks once per cell.

    Raises:
        BadValueError: the folder is missing, has no `train` folder with classes and images, or a class
            that cannot be read or holds no images.
    """
    if folder is None:
        raise BadValueError(
            "`data=image_folder` needs `data.folder=PATH`, laid out as ImageNet is."
        )
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise BadValueError(f"`data.folder={folder}`: there is no such folder on this machine.")
    if not (root / "train").is_dir():
        has = ", ".join(sorted(os.listdir(root))[:5]) or "nothing"
        raise BadValueError(
            f"`data.folder={folder}` has no folder `train` (it has {has}): images belong into "
            "`train/<class>/` and `val/<class>/`."
        )
    names = _folders(root / "train")
    empty = [name for name in names if not any(True for _ in _images(root / "train" / name))]
    if empty or not names:
        first = f"train/{empty[0] if empty else '<class>'}"
        raise BadValueError(
            f"`data.folder={folder}`: `{first}` holds no images ({len(empty)} of {len(names)} classes): let "
            f"it hold files that end in {', '.join(SUFFIXES)}, or remove it."
        )
    return names


@cache
def count_up_to(folder: str, split: str, most: int) -> int:
    """Count images of a split, but stop at `most`: enough to know whether a batch fits."""
    root = Path(folder).expanduser() / split
    every = (name for kind in _folders(root) for name in _images(root / kind))
    return sum(1 for _ in islice(every, most))


@cache
def files(folder: str, split: str) -> Files:
    """List all images of `train` or `val`; a split that is not there has none.

    Raises:
        BadValueError: `val` has a class that `train` has not, or images outside of classes.
    """
    import numpy as np  # not where only damaged images are listed

    classes = class_names(folder)
    root = Path(folder).expanduser() / split
    label_of = {name: label for label, name in enumerate(classes)}
    found = _folders(root)
    strangers = [name for name in found if name not in label_of]
    if strangers:
        letters = {unicodedata.normalize("NFC", name) for name in classes}
        same = [name for name in strangers if unicodedata.normalize("NFC", name) in letters]
        forms = (
            " Its letters are those of a class in another Unicode form (NFC or NFD): rename it as in `train`."
            * bool(same)
        )
        raise BadValueError(
            f"`data.folder={folder}`: `{split}/{(same or strangers)[0]}` is no class of `train` "
            f"({len(strangers)} such folders).{forms}"
        )
    if not found and any(True for _ in _images(root)):
        raise BadValueError(
            f"`data.folder={folder}`: images in `{split}` belong into folders of their class."
        )
    per_class = [sorted(_images(root / name)) for name in found]
    names = [os.fsencode(name) for part in per_class for name in part]
    counts = [len(part) for part in per_class]
    labels = np.repeat([label_of[name] for name in found], counts).astype(np.int64)
    return Files(str(root), classes, np.array(names, dtype=np.bytes_), labels)


def every_file(folder: str, split: str) -> Iterator[tuple[str, str]]:
    """Yield path of each visible file of a split, and why it is left out, "" for an image of a class."""
    root = Path(folder).expanduser() / split
    if not root.is_dir():
        return
    with _scanned(root) as entries:
        yield from ((e.path, "beside the class folders") for e in entries if _is_file(e))
    for name in _folders(root):
        for place, folders, names in os.walk(root / name):
            folders[:] = (inner for inner in folders if inner[0] != ".")
            for file in names:
                if file[0] != ".":
                    ending = os.path.splitext(file)[1].lower()
                    why = "" if ending in SUFFIXES else ending or "without an ending"
                    is_deeper = place != str(root / name)
                    yield os.path.join(place, file), "in deeper folders" if is_deeper else why


def _is_file(entry: "os.DirEntry[str]") -> bool:
    return entry.name[0] != "." and entry.is_file()


def _folders(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        return ()
    with _scanned(root) as entries:
        return tuple(sorted(e.name for e in entries if e.is_dir() and e.name[0] != "."))


def _images(folder: Path) -> Iterator[str]:
    """Names of image files, in no order; `._x.jpg` and the like are none."""
    if not folder.is_dir():
        return
    with _scanned(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(SUFFIXES) and entry.name[0] != ".":
                yield entry.name


def _scanned(folder: Path) -> Any:
    """Open a folder to read the names in it.

    Raises:
        BadValueError: the folder cannot be read.
    """
    try:
        return os.scandir(folder)
    except OSError as error:
        raise BadValueError(
            f"`data.folder`: `{folder}` cannot be read ({error.strerror}), and without it labels would be "
            f"others: give the right to read it (`chmod -R a+rX {folder}`), or move it away."
        ) from error
