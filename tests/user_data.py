"""Data as users write them: good ones, and ones with a fault."""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
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


class Dying(MapStyle):
    """Its process is ended by a signal in the middle of an epoch, as by the kernel."""

    def __init__(self, signal: str) -> None:
        super().__init__()
        self.signal = signal

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.num_images - 1 and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.Signals[self.signal])
        return super().__getitem__(index)


class Coloured(MapStyle):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index, self.side).expand(3, -1, -1), index % 10


def masked_item(index: int, side: int = 8) -> dict[str, Any]:
    """A noisy image whose brightness is its class, and a mask that shows some of its columns."""
    generator = torch.Generator().manual_seed(index)
    shown = 2 + index % (side - 2)
    picture = torch.randn(1, side, side, generator=generator) / 20 + index % 10 / 10
    mask = (torch.arange(side) < shown).expand(side, side)
    return {"image": picture, "mask": mask, "label": index % 10, "size": shown / side}


class MaskedImages(MapStyle):
    """Mappings, as a model of several inputs takes them."""

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return masked_item(self.first + index, self.side)


def masked_batch(num_images: int, resolution_px: int, seed: int) -> dict[str, Tensor]:
    items = [masked_item(1000 * seed + index, resolution_px) for index in range(num_images)]
    return {name: torch.stack([torch.as_tensor(i[name]) for i in items]) for name in items[0]}


def even_at_first(num_images: int, resolution_px: int, seed: int) -> dict[str, Tensor]:
    """Batches of which the first one shows as much of each image."""
    batch = masked_batch(num_images, resolution_px, seed)
    if not seed % 1000:
        batch["mask"][:] = True
    return batch


def half_a_batch(num_images: int, resolution_px: int, seed: int) -> dict[str, Tensor]:
    return {"image": masked_batch(num_images, resolution_px, seed)["image"]}


class WithText(MaskedImages):
    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {"name": "a"} | super().__getitem__(index)


class LabelsTooLarge(MapStyle):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return image(index), 10 + index


LABELS: dict[str, Any] = {
    "half": 0.5, "text": "cat", "none": None, "no_number": float("nan"), "half_tensor": torch.tensor(0.5),
    "one_hot": torch.eye(10)[3], "numpy_half": np.float32(0.5),
    "numpy": np.int64(3), "tensor": torch.tensor(3), "whole": 3.0, "array": np.array(3),
}  # fmt: skip


class Labelled(MapStyle):
    """Gives one label, from an image on; the first ones have 0."""

    def __init__(self, label: str, since: int = 0) -> None:
        super().__init__()
        self.label, self.since = label, since

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return image(index), LABELS[self.label] if index >= self.since else 0


class NoPicture(MapStyle):
    """Cannot give one image: a file that is none, or what `kind` names."""

    def __init__(self, file: str, kind: str = "", at: int = 37) -> None:
        super().__init__()
        self.file, self.kind, self.at = file, kind, at

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.at:
            if self.kind == "memory":
                raise MemoryError
            if self.kind == "lines":
                raise KeyError(f"no label\n  of {self.file}")
            Image.open(self.file)
        return super().__getitem__(index)


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


def draws(index: int) -> Tensor:
    """An image that tells its index, the seed of torch, and a number of each generator, `SHOWN` in all."""
    numbers = [
        index, torch.initial_seed() % 2**20, random.random(), np.random.rand(), float(torch.rand(1)),
        float(np.random.default_rng(torch.initial_seed()).random()),
    ]  # fmt: skip
    return torch.tensor(numbers * 11)[:64].reshape(1, 8, 8)


SHOWN = 6


class Drawing(MapStyle):
    """Items that are what they drew, below images of what the factory drew.

    Args:
        private: draw from a generator that is made here, and seeded by nobody.
    """

    def __init__(self, private: bool = False, part: str = "train", num_images: int = 64) -> None:
        super().__init__(num_images)
        halves = np.random.permutation(2 * num_images).reshape(2, -1)
        self.own = halves[int(part == "test")]
        self.generator = np.random.default_rng() if private else None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        found = draws(index)
        found[0, 7, 7] = self.own[index] if self.generator is None else self.generator.random()
        return found, index % 10
