"""Batches of a dataset of the user's (needs torch)."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vitsweep.data.batches import LoaderBatches, Pair, Request
from vitsweep.errors import BadValueError
from vitsweep.model.module_look import shown
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import example_of, in_float32
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.generators import (
    kept_generators,
    named_seed,
    seeded_generators,
    set_generators,
)
from vitsweep.world import World

Factory = Callable[..., Any]
"""Called with `training`, returns the map-style dataset of a split; None where no image is held out."""


@dataclass(frozen=True)
class Inspected:
    """What one check of the data has shown.

    Attributes:
        error: why the data cannot be read, or "".
        shape: of the first image.
        entries: of an item that is a mapping: name -> shape and type, as text; empty for pairs.
        num_train: training images; None where unknown.
        num_test: held-out images.
    """

    error: str = ""
    shape: tuple[int, ...] = ()
    entries: dict[str, str] = field(default_factory=dict)
    num_train: int | None = None
    num_test: int = 0

    def differs(self, model: ModuleSpec, resolution_px: int) -> str:
        """Say how a batch of `model.twin_batch` differs from what the data give; "" where it does not."""
        try:
            batch = example_of(model, 2, resolution_px)
        except BadValueError:
            return ""  # which the model itself says
        found = {name: shown(tensor[0]) for name, tensor in batch.items()}
        if found.keys() != self.entries.keys():
            return f"gives mappings of {', '.join(f'`{name}`' for name in found)}"
        apart = [name for name in found if found[name] != self.entries[name]]
        if not apart:
            return ""
        return f"gives `{apart[0]}` as {found[apart[0]]} instead of {self.entries[apart[0]]}"


def inspect_data(factory: Factory, target: str, label: str | None, num_classes: int) -> Inspected:
    """Read one item of the training images, and count those of both splits.

    Args:
        factory: of the data, called by `training`.
        target: its path, for the text of an error.
        label: the entry of a mapping that is the label.
        num_classes: labels are below it.

    Raises:
        BadValueError: the data are no map-style dataset, or the item is neither a pair nor a mapping.
        Exception: whatever the user's code raises.
    """
    train = factory(training=True)
    if not (hasattr(train, "__getitem__") and hasattr(train, "__len__")):
        raise BadValueError(
            f"`data.target={target}` returned a value of type {type(train).__name__}, which is no "
            "map-style dataset: return one, with `__len__` and `__getitem__`."
        )
    item = as_item(train[0], 0, target)
    is_mapping = isinstance(item, dict)
    number = item.get(label) if is_mapping else torch.tensor(item[1])
    fault = ""
    if number is not None and number.numel() == 1 and not 0 <= number.item() < num_classes:
        fault = (
            f"`data.target={target}` gave item 0 the label {number.item()}, and with "
            f"`data.num_classes={num_classes}` labels are from 0 to {num_classes - 1}: set "
            "it, or number the classes from 0."
        )
    held_out = factory(training=False)
    return Inspected(
        fault,
        shape=() if is_mapping else tuple(item[0].shape),
        entries={name: shown(part) for name, part in item.items()} if is_mapping else {},
        num_train=len(train),
        num_test=0 if held_out is None else len(held_out),
    )


def as_item(item: Any, index: int, target: str) -> Any:
    """Return an item of a dataset: a mapping of tensors, or an image and its label.

    Args:
        item: what the dataset gave.
        index: its position in the dataset.
        target: of the dataset, for the text of an error.

    Raises:
        BadValueError: it is neither; the text shows it.
    """
    if not isinstance(item, Mapping):
        return as_pair(item, index, target)
    found = {name: _as_tensor(part) for name, part in item.items()}
    for name, tensor in found.items():
        if tensor is None:
            raise BadValueError(
                f"`data.target={target}` gave item {index} the entry `{name}`, {shown(item[name])}: the "
                "entries of a mapping must be tensors, arrays or numbers."
            )
    return found


def _as_tensor(part: Any) -> Tensor | None:
    try:
        return in_float32(torch.as_tensor(part))
    except (TypeError, ValueError, RuntimeError):
        return None


def as_pair(item: Any, index: int, target: str) -> tuple[Tensor, int]:
    """Return an item of a dataset as image and label.

    Args:
        item: what the dataset gave.
        index: its position in the dataset.
        target: of the dataset, for the text of an error.

    Raises:
        BadValueError: it is no such pair, or its label is no whole number; the text shows it.
    """
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], Tensor)):
        raise BadValueError(
            f"`data.target={target}` gave item {index}: an item must be a pair of an image, a tensor "
            f"(C, H, W), and a label, or a mapping; got {shown(item)}."
        )
    label = _number(item[1])
    if not isinstance(label, int) and not (isinstance(label, float) and label.is_integer()):
        raise BadValueError(
            f"`data.target={target}` gave item {index} the label {shown(label)}, and a label is the "
            "number of a class, from 0 to `data.num_classes` - 1: return a whole number."
        )
    return item[0], int(label)


def _number(label: Any) -> Any:
    """Return the number in a tensor or array of one element, or in a number of numpy."""
    has_one = isinstance(label, (Tensor, np.ndarray, np.generic)) and prod(label.shape) == 1
    return label.item() if has_one else label


class _Checked:
    """Brings batches to the device; refuses those that the model cannot take."""

    def __init__(self, cell: CellSpec, device: torch.device) -> None:
        self.shape = cell.model.input_shape(cell.batch.resolution_px)
        self.target, self.classes = getattr(cell.data, "target", ""), cell.model.num_classes
        self.device, self.label = device, getattr(cell.data, "label", None)

    def __call__(self, read: Any) -> Any:
        if isinstance(read, Mapping):
            if self.label is not None and self._is_wrong(read[self.label]):
                raise BadValueError(
                    f"`data.target={self.target}` gave labels {read[self.label].tolist()[:8]} in "
                    f"`{self.label}`, and the model takes whole numbers from 0 to {self.classes - 1}."
                )
            return {name: part.to(self.device, non_blocking=True) for name, part in read.items()}
        images, labels = read
        wrong = self._is_wrong(labels)
        if images.shape[1:] != self.shape or wrong:
            raise BadValueError(
                f"`data.target={self.target}` gave a batch of images {tuple(images.shape)} of "
                f"{images.dtype} and labels {labels.tolist()[:8]}{'...' * (len(labels) > 8)}; the model "
                f"takes images {('batch', *self.shape)} and labels from 0 to {self.classes - 1}."
            )
        there = images.to(self.device, non_blocking=True).to(torch.float32)
        return there, labels.to(self.device, non_blocking=True)

    def _is_wrong(self, labels: Tensor) -> bool:
        if labels.is_floating_point() or labels.ndim != 1:
            return True
        return bool(len(labels)) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes


class PairReader(Dataset[Pair]):
    """Reads requests of a map-style dataset, which it opens in its own process.

    What an item draws follows from the seed, the split, the epoch and its position in the dataset, whoever
    reads it; what the factory draws from the seed alone, so that one split may be what a permutation leaves
    over of the other. A rank that reads itself draws afterwards as if it had not.
    """

    def __init__(self, factory: Factory, target: str, seed: int, *, training: bool) -> None:
        self._factory, self._target, self._seed, self._training = factory, target, seed, training
        self._split = "train" if training else "test"
        self._dataset: Any = None

    def __getitem__(self, request: Request) -> Pair:
        """Read one batch: images (B, C, H, W) and labels (B,), or a mapping."""
        if self._dataset is None:
            with seeded_generators(self._seed, "data"):
                self._dataset = self._factory(training=self._training)
        with nullcontext() if get_worker_info() else kept_generators():
            items = [(row, self._item(request.epoch, row)) for row in request.rows.tolist()]
        pairs: Any = [as_item(item, index, self._target) for index, item in items]
        if isinstance(pairs[0], dict):
            named = {n: _stack([item[n] for item in pairs], f"`{n}`") for n in pairs[0]}
            return named  # type: ignore[return-value]
        images = _stack([image for image, _ in pairs], "The images")
        return images, torch.tensor([label for _, label in pairs])

    def _item(self, epoch: int, row: int) -> Any:
        set_generators(named_seed(self._seed, f"{self._split} {epoch} {row}"))
        try:
            return self._dataset[row]
        except Exception as error:  # the code is the user's
            error.add_note(f"(item {row} of `data.target={self._target}`)")
            raise


def _stack(tensors: list[Tensor], what: str) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise BadValueError(
            f"{what} of one batch have different shapes, {sorted(shapes)}: let the dataset resize."
        )
    return torch.stack(tensors)


class MapStyleBatches(LoaderBatches[Pair]):
    """Batches of a map-style dataset on a rank, from workers.

    Args:
        cell: what is trained.
        world: this rank.
        factory: of the data.
        found: what a check of them has shown.
        num_workers: processes that read.
        prefetch_batches: micro-batches that each worker prepares ahead.
    """

    def __init__(
        self,
        cell: CellSpec,
        world: World,
        factory: Factory,
        found: Inspected,
        num_workers: int,
        prefetch_batches: int,
    ) -> None:
        self.num_train, self.num_test = found.num_train or 0, found.num_test
        self._factory, self._checked = factory, _Checked(cell, world.device)
        super().__init__(cell, world, num_workers, prefetch_batches)

    def reader(self, *, training: bool) -> PairReader:
        """Return what reads one split."""
        target, seed = self._checked.target, self._sampler.seed
        return PairReader(self._factory, target, seed, training=training)

    def deliver(self, read: Pair, *, training: bool) -> Pair:
        """Check the shapes and move the batch to the device."""
        return self._checked(read)
