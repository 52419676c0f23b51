"""A folder of images in ImageNet's layout."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, image_count_conflicts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Data):
    """`train/<class>/*.jpg` and `val/<class>/*.jpg` (or png, webp, tif, bmp), decoded as they come.

    Training images are cut at random (Szegedy et al., arXiv:1409.4842: 8 % to 100 % of the area,
    sides 3:4 to 4:3) and mirrored; held-out ones are cut at the centre. Which cut an image gets
    depends on seed, epoch and image only. Labels are the sorted names of the class folders.

    Attributes:
        folder: where `train` and `val` lie; every node must see it. None is refused.
        native_resolution_px: side of a cut where `batch.resolution_px=auto`.
        num_workers: processes per rank that decode; 0 decodes in the rank itself.
        prefetch_batches: micro-batches that each worker prepares ahead.
        smallest_crop_share: least share of an image's area that a random cut keeps; at most 1.
        test_crop_share: share of the shorter side that the centre cut keeps.
        max_damaged_share: images that cannot be read are named, skipped and replaced by the next
            readable one, up to this share of a split; beyond it the command is refused, or the run fails.
    """

    folder: str | None
    native_resolution_px: Annotated[int, Gt(0)]
    num_workers: Annotated[int, Ge(0)]
    prefetch_batches: Annotated[int, Gt(0)]
    smallest_crop_share: Annotated[float, Gt(0), Le(1)]
    test_crop_share: Annotated[float, Gt(0), Le(1)]
    max_damaged_share: Annotated[float, Ge(0), Le(1)]

    decodes_files: ClassVar[bool] = True
    num_channels: ClassVar[int] = 3  # red, green, blue; grey images are converted

    @property
    def num_classes(self) -> int:
        """Number of class folders in `train`.

        Raises:
            BadValueError: the folder is missing, empty, or not laid out as it should be.
        """
        return len(class_names(self.folder))

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse too few images, counting no further than needed."""
        if self.folder is not None:
            train = count_up_to(self.folder, "train", cell.images_per_step)
            test = count_up_to(self.folder, "val", cell.mesh.data_parallel_size)
            yield from image_count_conflicts(cell, train, test, "more images in `data.folder`")

    def splits(self, cell: CellSpec) -> tuple[str, ...]:
        """Return the names of the folders that a cell reads."""
        return ("train", "val") if cell.task.epochs else ("train",)

    def split_sizes(self) -> tuple[int, int] | None:
        """Count the files, once in the life of the process."""
        if self.folder is None:
            return None
        train, test = (count_up_to(self.folder, split, sys.maxsize) for split in ("train", "val"))
        return train, test

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """List the files and prepare the loader."""
        from vitsweep.data.image_loader import open_image_folder

        assert self.folder is not None, "refused when the cell was made"
        splits = {split: files(self.folder, split) for split in ("train", "val")}
        return open_image_folder(self, splits, cell, world)


# What lies in the folder.


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
    if len(empty) == len(names):
        raise BadValueError(
            f"`data.folder={folder}` holds no images: `train/<class>/` should hold files that end "
            f"in {', '.join(SUFFIXES)}."
        )
    if empty:
        raise BadValueError(
            f"`data.folder={folder}`: the class `train/{empty[0]}` holds no images ({len(empty)} of "
            f"{len(names)} classes), so that it cannot be learnt. Fill the folder, or remove it."
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
        raise BadValueError(
            f"`data.folder={folder}`: `{split}/{strangers[0]}` is no class of `train` "
            f"({len(strangers)} such folders)."
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
