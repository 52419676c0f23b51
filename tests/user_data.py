"""Data as users write them: good ones, and ones with a fault."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def image(index: int, side: int = 8) -> Tensor:
    """An image that tells its index."""
    return torch.full((1, side, side), float(index))


class MapStyle:
    def __init__(self, num_images: int = 64, side: int = 8, first: int = 0) -> None:
        self.num_images, self.side, self.first = num_images, side, first

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(self.first + index, self.side), index % 10


class Coloured(MapStyle):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index, self.side).expand(3, -1, -1), index % 10


class LabelsTooLarge(MapStyle):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index), 10 + index


class Ragged(MapStyle):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index, 8 + index % 2), 0


def stream(num_images: int = 64) -> Iterator[tuple[Tensor, int]]:
    return ((image(index), index % 10) for index in range(num_images))


def unpaired() -> Any:
    return [torch.zeros(1, 8, 8)] * 64


def nothing() -> Any:
    return 7


def imports_what_is_missing() -> Any:
    import no_such_package

    return no_such_package
