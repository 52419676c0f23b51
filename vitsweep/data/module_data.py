"""Data of the user's: any factory of a map-style dataset."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt

from vitsweep.errors import BadValueError
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, image_count_conflicts
from vitsweep.spec.from_yaml import imported_function, title_of, wrong_target
from vitsweep.spec.generators import seeded_generators
from vitsweep.spec.model_spec import needs_equal_parts

if TYPE_CHECKING:
    from vitsweep.data.module_batches import Inspected
    from vitsweep.world import World

_INSPECTED: dict[str, "Inspected"] = {}


@dataclass(frozen=True, kw_only=True)
class ModuleData(Data):
    """Pairs of an image (C, H, W) and its label, or mappings, from a factory of the user's.

    The tensors and numbers of a mapping are stacked into a batch, a mapping of the same names.

    The dataset is map-style, with `__len__` and `__getitem__`, and read by workers in the order of `seed`.

    Attributes:
        target: path of the factory, `package.module.function`, called with keyword arguments.
        arguments: of the factory, for the training images.
        test_arguments: over `arguments` for the held-out images; null where there are none.
        num_channels: channels of an image.
        num_classes: labels are integers from 0 to this, without it.
        native_resolution_px: side of an image where `batch.resolution_px=auto`.
        num_images: null; it keeps the ids of cells from when iterables were read.
        num_workers: processes per rank that read; 0 reads in the rank itself.
        prefetch_batches: micro-batches that each worker prepares ahead.
        label: the entry of a mapping that is the label; null where no entry is one.
    """

    target: str | None
    arguments: dict[str, Any] = field(hash=False)
    test_arguments: dict[str, Any] | None = field(hash=False)
    num_channels: Annotated[int, Gt(0)]
    num_classes: Annotated[int, Gt(0)]
    native_resolution_px: Annotated[int, Gt(0)]
    num_workers: Annotated[int, Ge(0)]
    prefetch_batches: Annotated[int, Gt(0)]
    label: str | None = field(default=None, metadata={"identity": "where set"})
    num_images: None = None

    @property
    def title(self) -> str:
        """The class or function that is called, unless a YAML file names the choice."""
        return title_of(self.name, self.target)

    @property
    def code_modules(self) -> tuple[str, ...]:
        """The module of the factory."""
        return (self.target.rpartition(".")[0],) if self.target else ()

    @property
    def key(self) -> str:
        """Text that is equal for two data sets that are read alike."""
        return json.dumps(vars(self), sort_keys=True, default=str)

    def call(self, *, training: bool) -> Any:
        """Call the factory for one split; return None where no image is held out.

        Raises:
            Exception: whatever importing or calling it raises.
        """
        assert self.target is not None, "refused when the cell was made"
        own = {} if training else self.test_arguments
        return None if own is None else imported_function(self.target)(**(self.arguments | own))

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Open the data and look at one pair."""
        if wrong := self._wrong_target():
            yield wrong
            return
        found = self._looked_at()
        yield from self.shape_faults(cell)
        if not found.error:  # else nothing is known of the items
            yield from self._mapping_conflicts(cell, found.entries)
        if found.num_train is not None:
            more = "more images from `data.target`"
            if self.test_arguments is None:
                more += " (its `++data.test_arguments.NAME=VALUE` give held-out ones)"
            yield from image_count_conflicts(cell, found.num_train, found.num_test, more)

    def shape_faults(self, cell: CellSpec) -> Iterator[str]:
        """Compare one item with the cell's images, or with a batch of `model.twin_batch`."""
        if self._wrong_target():
            return
        found, model, side = self._looked_at(), cell.model, cell.batch.resolution_px
        wanted = (self.num_channels, side, side)
        if found.error:
            yield found.error
        elif not found.entries and found.shape != wanted:
            yield (
                f"`data.target={self.target}` gives images of shape {found.shape}, and `data.num_channels="
                f"{self.num_channels}` with `batch.resolution_px={side}` says {wanted}: "
                "set both, or let the dataset resize."
            )
        if not found.entries or not isinstance(model, ModuleSpec):
            return
        gives = self._gives(found.entries)
        if model.twin_batch is None:
            yield (
                f"{gives}, and the proof and the count of FLOPs need such a batch: set `model.twin_batch="
                "package.module.function`, a function of (num_images, resolution_px, seed) that returns one."
            )
        elif differing := found.differs(model, side):
            yield (
                f"{gives}, and `model.twin_batch={model.twin_batch}` {differing} at `batch.resolution_px="
                f"{side}`: let both give the same; `data.native_resolution_px` is the side of an image."
            )

    def _wrong_target(self) -> str:
        return wrong_target("data", self.name, self.target, "a map-style dataset of (image, label)")

    def _looked_at(self) -> "Inspected":
        """Call the factory and read one item; a second call remembers."""
        if self.key not in _INSPECTED:
            with seeded_generators(0, "look"):
                _INSPECTED[self.key] = self._inspect()
        return _INSPECTED[self.key]

    def _inspect(self) -> "Inspected":
        from vitsweep.data.module_batches import Inspected, inspect_data

        assert self.target is not None, "refused when the cell was made"
        try:
            imported_function(self.target)
        except Exception as error:  # the module is the user's
            return Inspected(
                f"`data.target={self.target}` cannot be imported ({type(error).__name__}: {error})."
            )
        try:
            return inspect_data(self.call, self.target, self.label, self.num_classes)
        except BadValueError as error:  # of `as_item`: the user's code raised nothing
            return Inspected(str(error))
        except Exception as error:  # the code is the user's
            return Inspected(
                f"`data.target={self.target}` raised {type(error).__name__} with the arguments "
                f"{self.arguments} ({error})."
            )

    def _gives(self, entries: dict[str, str]) -> str:
        names = ", ".join(f"`{name}`" for name in entries)
        return f"`data.target={self.target}` gives mappings of {names}"

    def _mapping_conflicts(self, cell: CellSpec, entries: dict[str, str]) -> Iterator[str]:
        """Refuse what does not fit to items that are mappings, or that are none."""
        model, typed = cell.model, f"`data.target={self.target}`"
        twin_batch = getattr(model, "twin_batch", None)
        if not entries:
            for knob, value in (("model.twin_batch", twin_batch), ("data.label", self.label)):
                if value:
                    yield (
                        f"`{knob}={value}` is for data that give mappings, and {typed} gives pairs: leave "
                        "it out."
                    )
            return
        gives = self._gives(entries)
        if not isinstance(model, ModuleSpec):
            yield f"{gives}, and `model={model.name}` takes images alone: use `model=module`."
            return
        if self.label is not None and self.label not in entries:
            yield f"`data.label={self.label}` is none of the entries: {gives}."
        if self.label is None and (cell.loss_function is None or cell.task.epochs):
            needs = (
                "the cross entropy"
                if cell.loss_function is None
                else f"the accuracy of `task={cell.task.name}`"
            )
            yield f"{gives}, and {needs} needs labels: name their entry, as `data.label=label`."
        if cell.task.epochs and cell.recipe.augments:
            yield (
                f"`recipe={cell.recipe.name}` augments pairs of images and labels, and {gives}: let the "
                "dataset augment, and use `recipe=none`."
            )
        if cell.loss_function is None:
            yield from needs_equal_parts(cell, f"data.target={self.target}")

    def split_sizes(self) -> tuple[int, int] | None:
        """As the factory's data sets say."""
        if self.target is None:
            return None
        found = self._looked_at()
        return None if found.num_train is None else (found.num_train, found.num_test)

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Call the factory, and prepare workers where it is map-style."""
        from vitsweep.data.module_batches import MapStyleBatches

        found = self._looked_at()
        return MapStyleBatches(
            cell, world, self.call, found, self.num_workers, self.prefetch_batches
        )
