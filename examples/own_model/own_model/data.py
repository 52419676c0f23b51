"""Striped images: the label says in which direction and how wide the stripes are."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Stripes(Dataset):  # type: ignore[type-arg]
    """Noisy stripes, each made anew from its index: pairs of an image (1, side, side) and a label."""

    def __init__(self, num_images: int, side: int, first: int = 0) -> None:
        self.num_images, self.side, self.first = num_images, side, first

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return image and label 0 to 3."""
        label = index % 4
        stripes = (torch.arange(self.side) // (1 + label // 2)) % 2
        image = stripes.float().expand(self.side, self.side)
        noise = torch.randn(
            self.side, self.side, generator=torch.Generator().manual_seed(self.first + index)
        )
        return (image if label % 2 else image.T)[None] + 0.3 * noise, label


def stripes(num_images: int = 512, side: int = 8, first: int = 0) -> Stripes:
    """Return the images from `first` on."""
    return Stripes(num_images, side, first)
