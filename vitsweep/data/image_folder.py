"""A folder of images in ImageNet's layout."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from vitsweep.data.folder_files import class_names, count_up_to, files
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, image_count_conflicts

if TYPE_CHECKING:
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
        from vitsweep.data.image_loader import ImageFolderBatches

        assert self.folder is not None, "refused when the cell was made"
        splits = {split: files(self.folder, split) for split in ("train", "val")}
        return ImageFolderBatches(
            cell,
            world,
            splits,
            decoded=self.splits(cell),
            crop_shares={"train": self.smallest_crop_share, "val": self.test_crop_share},
            max_damaged_share=self.max_damaged_share,
            num_workers=self.num_workers,
            prefetch_batches=self.prefetch_batches,
        )
