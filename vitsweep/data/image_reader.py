"""Reading batches of images from files: what runs in the loader's workers."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vitsweep.data.folder_scan import Files
from vitsweep.data.image_crop import as_rgb, centre_box, cut, random_box
from vitsweep.data.loader_batches import Request


class Read(NamedTuple):
    """A batch that was read.

    Attributes:
        images: (B, H, W, 3) uint8: a quarter of the bytes that would travel as float32.
        labels: (B,) int64.
        damaged: path and reason of every image that could not be read.
    """

    images: Tensor
    labels: Tensor
    damaged: list[tuple[str, str]]


class ImageReader(Dataset[Read]):
    """Reads requests, for training (random cuts) or for a test (centre cuts).

    A damaged image is replaced by the next readable one when training. In a test it is left out
    instead: no other image may count twice.

    Args:
        files: of one split.
        side: of a cut, in pixels.
        crop_share: smallest share of the area when training, share of the shorter side in a test.
        training: cut and mirror at random.
        seed: decides the cuts, together with epoch and row.
        max_damaged: a request that meets more damaged images is given up: the run will fail.
    """

    def __init__(
        self,
        files: Files,
        *,
        side: int,
        crop_share: float,
        training: bool,
        seed: int,
        max_damaged: int,
    ) -> None:
        self.files, self.side, self.crop_share = files, side, crop_share
        self.training, self.seed, self.max_damaged = training, seed, max_damaged

    def __getitem__(self, request: Request) -> Read:
        """Read one batch; it is shorter than asked where damaged images were left out."""
        damaged: dict[str, str] = {}
        shape = (len(request.rows), self.side, self.side, 3)
        images, labels = np.empty(shape, np.uint8), np.empty(len(request.rows), np.int64)
        count = 0
        for row in request.rows.tolist():
            readable = self._first_readable(self._candidates(row), damaged)
            if readable is not None:
                found, image = readable
                images[count] = self._cut(image, found, request.epoch)
                labels[count] = self.files.labels[found]
                count += 1
        return Read(
            torch.from_numpy(images[:count]),
            torch.from_numpy(labels[:count]),
            list(damaged.items()),
        )

    def _candidates(self, row: int) -> Iterable[int]:
        if not self.training:
            return (row,)
        count = len(self.files)
        return ((row + step) % count for step in range(count))

    def _first_readable(
        self, rows: Iterable[int], damaged: dict[str, str]
    ) -> tuple[int, Image.Image] | None:
        for row in rows:
            if len(damaged) > self.max_damaged:
                return None
            path = self.files.path(row)
            try:
                with Image.open(path) as file:
                    return row, as_rgb(file)
            except MemoryError:
                raise
            except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
                damaged[path] = str(error) or type(error).__name__
        return None

    def _cut(self, image: Image.Image, row: int, epoch: int) -> NDArray[np.uint8]:
        if not self.training:
            return cut(image, centre_box(*image.size, self.crop_share), self.side)
        random = np.random.default_rng((self.seed, epoch, row))
        box = random_box(*image.size, self.crop_share, random)
        return cut(image, box, self.side, mirrored=bool(random.random() < 0.5))
