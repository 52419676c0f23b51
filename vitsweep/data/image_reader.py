"""Reading batches of images from files: what runs in the loader's workers."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vitsweep.data.decoded_cache import DecodedImages
from vitsweep.data.folder_scan import Files
from vitsweep.data.image_crop import centre_box, cut, decode, random_box
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
        decoded: the pixels of the split, where they are kept; None decodes the files.
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
        decoded: DecodedImages | None = None,
    ) -> None:
        self.files, self.side, self.crop_share = files, side, crop_share
        self.training, self.seed, self.max_damaged = training, seed, max_damaged
        self.decoded = decoded

    def __getitem__(self, request: Request) -> Read:
        """Read one batch; it is shorter than asked where damaged images were left out."""
        images, labels = self.empty(len(request.rows))
        count, damaged = self.fill(request, images.numpy(), labels.numpy())
        return Read(images[:count], labels[:count], list(damaged.items()))

    def empty(self, count: int, *, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Return room for images (count, H, W, 3) uint8 and labels (count,)."""
        images = torch.empty((count, self.side, self.side, 3), dtype=torch.uint8, pin_memory=pinned)
        return images, torch.empty(count, dtype=torch.int64, pin_memory=pinned)

    def fill(
        self, request: Request, images: NDArray[np.uint8], labels: NDArray[np.int64]
    ) -> tuple[int, dict[str, str]]:
        """Read a request into arrays; return how many images there are, and path -> why not."""
        damaged: dict[str, str] = {}
        count = 0
        for row in request.rows.tolist():
            readable = self._first_readable(self._candidates(row), damaged)
            if readable is not None:
                found, image = readable
                images[count] = self._cut(image, found, request.epoch)
                labels[count] = self.files.labels[found]
                count += 1
        return count, damaged

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
            image = self.decoded.image(row) if self.decoded else decode(self.files.path(row))
            if not isinstance(image, str):
                return row, image
            damaged[self.files.path(row)] = image
        return None

    def _cut(self, image: Image.Image, row: int, epoch: int) -> NDArray[np.uint8]:
        if not self.training:
            return cut(image, centre_box(*image.size, self.crop_share), self.side)
        random = np.random.default_rng((self.seed, epoch, row))
        box = random_box(*image.size, self.crop_share, random)
        return cut(image, box, self.side, mirrored=bool(random.random() < 0.5))
