"""Epochs of a training with smaller images and fewer patches than the cell has."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn
from torch.nn.functional import interpolate

from vitsweep.model.flops import train_flops
from vitsweep.model.kept_patches import drop_after_embedding
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.model_variant import EpochSize
from vitsweep.training.trainer import MicroBatch


class EpochSizes:
    """Cuts images and tokens of a training down to the size of the epoch.

    Args:
        model: a ViT before any technique wraps it; its embedding gets a hook.
    """

    def __init__(self, model: nn.Module) -> None:
        self._size: EpochSize | None = None
        vit: Any = model
        vit.embedding.resizes_position = True
        drop_after_embedding(model, self._kept)

    def _kept(self, patches: int) -> int:
        return self._size.kept(patches) if self._size else patches

    def begin(self, size: EpochSize, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Begin an epoch; return its batches with images of its size."""
        self._size = size
        resize = partial(interpolate, size=(size.resolution_px,) * 2, mode="bilinear")
        side = size.resolution_px
        return (
            (resize(images, antialias=True) if images.shape[-1] > side else images, labels)
            for images, labels in batches
        )


def flops_share(cell: CellSpec) -> float:
    """Return the model FLOPs of an image, mean over the epochs, over those of an epoch of full size."""
    if not cell.schedule.changes_sizes:
        return 1.0
    flops = [_flops(cell, size) for size in _sizes(cell)]
    return sum(flops) / len(flops) / _flops(cell, EpochSize(cell.batch.resolution_px))


def _sizes(cell: CellSpec) -> list[EpochSize]:
    return [cell.schedule.size(cell, epoch) for epoch in range(cell.task.epochs)]


def _flops(cell: CellSpec, size: EpochSize) -> int:
    shape = replace(cell, batch=replace(cell.batch, resolution_px=size.resolution_px)).shape
    if size.keep < 1 and isinstance(shape, ViTSpec):
        patches = shape.num_patches(size.resolution_px)
        shape = replace(shape, kept_patches=size.kept(patches))
    return train_flops(shape, size.resolution_px, cell.classifier.pooling, cell.attention_pattern)


def described(cell: CellSpec) -> str | None:
    """Return the sizes of all epochs as text; None where they are the same.

    "0-3: 16 px, 50 % of the patches; 4-9: 32 px"
    """
    if not cell.schedule.changes_sizes:
        return None
    runs = []
    for size, group in groupby(enumerate(_sizes(cell)), key=lambda pair: pair[1]):
        numbers = [epoch for epoch, _ in group]
        which = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        kept = f", {100 * size.keep:.0f} % of the patches" if size.keep < 1 else ""
        runs.append(f"{which}: {size.resolution_px} px{kept}")
    return "; ".join(runs)
