"""Batches of a dataset of the user's (needs torch)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vitsweep.data.batches import ReplicaSampler
from vitsweep.data.loader_batches import LoaderBatches, Pair, Request
from vitsweep.errors import BadValueError
from vitsweep.model.module_look import shown
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import example_of, in_float32
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
from vitsweep.spec.from_yaml import imported_function
from vitsweep.spec.generators import (
    OwnGenerators,
    kept_generators,
    named_seed,
    seeded_generators,
    set_generators,
)
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.data.module_data import ModuleData

_INSPECTED: dict[str, "Inspected"] = {}


@dataclass(frozen=True)
class Inspected:
    """What one look at the data has shown.

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

    def problems(self, data: "ModuleData", side: int) -> Iterator[str]:
        """Yield what is wrong with the data for images of this side."""
        wanted = (data.num_channels, side, side)
        if self.error:
            yield self.error
        elif not self.entries and self.shape != wanted:
            yield (
                f"`data.target={data.target}` gives images of shape {self.shape}, and `data.num_channels="
                f"{data.num_channels}` with `batch.resolution_px={side}` says {wanted}: "
                f"{self._set(*wanted[:2])}let the dataset resize."
            )

    def _set(self, channels: int, side: int) -> str:
        """Return the settings to type for images of this shape; "" where they are no squares."""
        if len(self.shape) != 3 or self.shape[1] != self.shape[2]:
            return ""
        wanted = {"data.num_channels": channels, "batch.resolution_px": side}
        found = zip(wanted, self.shape, strict=False)
        typed = [f"{key}={own}" for key, own in found if own != wanted[key]]
        return f"set `{' '.join(typed)}`, or "

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
        return (
            f"gives `{apart[0]}` as {found[apart[0]]} instead of {self.entries[apart[0]]}"
            if apart
            else ""
        )


def inspected(data: "ModuleData") -> Inspected:
    """Call the factory and read one pair; a second call remembers."""
    if data.key not in _INSPECTED:
        with seeded_generators(0, "look"):
            _INSPECTED[data.key] = _inspect(data)
    return _INSPECTED[data.key]


def _inspect(data: "ModuleData") -> Inspected:
    assert data.target is not None, "refused when the cell was made"
    try:
        imported_function(data.target)
    except Exception as error:  # the module is the user's
        return Inspected(
            f"`data.target={data.target}` cannot be imported ({type(error).__name__}: {error})."
        )
    try:
        train = data.call(training=True)
        if not (_is_map_style(train) or hasattr(train, "__iter__")):
            return Inspected(
                f"`data.target={data.target}` returned a value of type {type(train).__name__}, which is "
                "neither a map-style dataset (`__len__`, `__getitem__`) nor an iterable of (image, label) "
                "or mappings."
            )
        if not _is_map_style(train) and data.num_images is None:
            return Inspected(
                f"`data.target={data.target}` returned an iterable: say with `data.num_images` how "
                "many images one pass over it gives."
            )
        first = train[0] if _is_map_style(train) else next(iter(train))
        item = as_item(first, 0, data.target)
        is_mapping = isinstance(item, dict)
        label = item.get(data.label) if is_mapping else torch.tensor(item[1])
        fault = ""
        if label is not None and label.numel() == 1 and not 0 <= label.item() < data.num_classes:
            fault = (
                f"`data.target={data.target}` gave item 0 the label {label.item()}, and with "
                f"`data.num_classes={data.num_classes}` labels are from 0 to {data.num_classes - 1}: set "
                "it, or number the classes from 0."
            )
        num_test = 0
        if data.test_arguments is not None:
            test = data.call(training=False)
            num_test = len(test) if _is_map_style(test) else data.num_images or 0
        num_train = len(train) if _is_map_style(train) else data.num_images
        return Inspected(
            fault,
            shape=() if is_mapping else tuple(item[0].shape),
            entries={name: shown(part) for name, part in item.items()} if is_mapping else {},
            num_train=num_train,
            num_test=num_test,
        )
    except BadValueError as error:  # of `as_item`: the user's code raised nothing
        return Inspected(str(error))
    except Exception as error:  # the code is the user's
        return Inspected(
            f"`data.target={data.target}` raised {type(error).__name__} with the arguments "
            f"{data.arguments} ({error})."
        )


def as_item(item: Any, index: int, target: str | None) -> Any:
    """Return an item of a dataset: a mapping of tensors, or an image and its label.

    Args:
        item: what the dataset gave.
        index: its place in the dataset, or in one pass over an iterable.
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


def as_pair(item: Any, index: int, target: str | None) -> tuple[Tensor, int]:
    """Return an item of a dataset as image and label.

    Args:
        item: what the dataset gave.
        index: its place in the dataset, or in one pass over an iterable.
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


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def open_module_data(data: "ModuleData", cell: CellSpec, world: World) -> Batches:
    """Return the batches of this rank, from workers or from the iterable itself."""
    sampler, checked = ReplicaSampler.of(cell, world), _Checked(cell, world.device)
    with seeded_generators(cell.seed, "data"):
        is_map_style = _is_map_style(data.call(training=True))
    return (MapStyleBatches if is_map_style else IterableBatches)(data, sampler, checked)


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

    What an item draws follows from the seed, the split, the epoch and its place in the dataset, whoever
    reads it; what the factory draws from the seed alone, so that one split may be what a permutation leaves
    over of the other. A rank that reads itself draws afterwards as if it had not.
    """

    def __init__(self, data: "ModuleData", seed: int, *, training: bool) -> None:
        self._data, self._seed, self._training = data, seed, training
        self._split = "train" if training else "test"
        self._dataset: Any = None

    def __getitem__(self, request: Request) -> Pair:
        """Read one batch: images (B, C, H, W) and labels (B,), or a mapping."""
        if self._dataset is None:
            with seeded_generators(self._seed, "data"):
                self._dataset = self._data.call(training=self._training)
        with nullcontext() if get_worker_info() else kept_generators():
            items = [(row, self._item(request.epoch, row)) for row in request.rows.tolist()]
        return _stacked(items, self._data.target)

    def _item(self, epoch: int, row: int) -> Any:
        set_generators(named_seed(self._seed, f"{self._split} {epoch} {row}"))
        try:
            return self._dataset[row]
        except Exception as error:  # the code is the user's
            error.add_note(_place(row, self._data.target))
            raise


Item = tuple[int, Any]
"""What a dataset gives, with its place in it."""


def _place(index: int, target: str | None) -> str:
    return f"(item {index} of `data.target={target}`)"


def _numbered(items: Iterable[Any], target: str | None) -> Iterator[Item]:
    """Yield the items of an iterable with their indices; an error is given the index of its item."""
    index = 0
    try:
        for item in items:
            yield index, item
            index += 1
    except Exception as error:  # the code is the user's
        error.add_note(_place(index, target))
        raise


def _stacked(items: list[Item], target: str | None) -> Any:
    pairs = [as_item(item, index, target) for index, item in items]
    if isinstance(pairs[0], dict):
        return {name: _stack([item[name] for item in pairs], f"`{name}`") for name in pairs[0]}
    return _stack([image for image, _ in pairs], "The images"), torch.tensor([y for _, y in pairs])


def _stack(tensors: list[Tensor], what: str) -> Tensor:
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise BadValueError(
            f"{what} of one batch have different shapes, {sorted(shapes)}: let the dataset resize."
        )
    return torch.stack(tensors)


class MapStyleBatches(LoaderBatches[Pair]):
    """Batches of a map-style dataset."""

    def __init__(self, data: "ModuleData", sampler: ReplicaSampler, checked: _Checked) -> None:
        found = inspected(data)
        self.num_train, self.num_test = found.num_train or 0, found.num_test
        self._data, self._checked = data, checked
        super().__init__(sampler, checked.device, data.num_workers, data.prefetch_batches)

    def reader(self, *, training: bool) -> PairReader:
        """Return what reads one split."""
        return PairReader(self._data, self._sampler.seed, training=training)

    def deliver(self, read: Pair, *, training: bool) -> Pair:
        """Check the shapes and move the batch to the device."""
        return self._checked(read)


class IterableBatches(Batches):
    """Batches of an iterable, read in the rank itself: its time is time in which the rank waits.

    Every rank passes over all items and keeps those of its share, so that all ranks together see
    the same global batches whatever their number. An epoch is one pass; the remainder is dropped. What
    a pass draws follows from the seed, the split and the epoch.
    """

    def __init__(self, data: "ModuleData", sampler: ReplicaSampler, checked: _Checked) -> None:
        self.num_train = data.num_images or 0
        self.num_test = self.num_train if data.test_arguments is not None else 0
        self._data, self._sampler, self._checked = data, sampler, checked

    def train(self, epoch: int, first: int = 0) -> Iterator[Pair]:
        """Pass over the iterable once; `first` micro-batches are left out."""
        sampler, items = self._sampler, self._items(training=True)
        own = sampler.accumulation_steps * sampler.micro_batch
        micro_batches: Iterator[list[Item]] = chain.from_iterable(
            _cut(step[sampler.replica * own :][:own], sampler.micro_batch)
            for step in _steps(items, sampler.images_per_step)
        )
        wanted = sampler.micro_batches(self.num_train)
        read = islice(micro_batches, first, wanted)
        for items_of_one in OwnGenerators(read, sampler.seed, f"train {epoch}"):
            yield self._checked(_stacked(items_of_one, self._data.target))

    def test(self) -> Iterator[Pair]:
        """Yield this replica's held-out images, in the order of the iterable."""
        with seeded_generators(self._sampler.seed, "test"):
            items = list(islice(self._items(training=False), self.num_test))
        for rows in self._sampler.test(len(items)):
            yield self._checked(_stacked([items[row] for row in rows], self._data.target))

    def _items(self, *, training: bool) -> Iterator[Item]:
        """Open the iterable when its first item is read: that draws from the states of the pass too."""
        yield from _numbered(self._data.call(training=training), self._data.target)


def _steps(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yield whole global batches."""
    while len(step := list(islice(items, size))) == size:
        yield step


def _cut(items: list[Item], size: int) -> list[list[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
