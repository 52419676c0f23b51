"""Where images come from: a choice of the group `data`, and the batches that it opens on a rank."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.spec.technique import Technique

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Data(Technique):
    """Where images and labels come from.

    Attributes:
        num_channels: channels of one image.
        num_classes: number of labels.
        native_resolution_px: side of an image where `batch.resolution_px=auto`.
        fixed_sizes: training and held-out images, of data that always have as many.
        larger: what has more images than these, as typed.
    """

    if TYPE_CHECKING:  # not at run time, where a field cannot override a property

        @property
        def num_channels(self) -> int: ...  # noqa: D102
        @property
        def num_classes(self) -> int: ...  # noqa: D102
        @property
        def native_resolution_px(self) -> int: ...  # noqa: D102

    decodes_files: ClassVar[bool] = False
    """True where images are decoded from files, so that every choice of `loader` can read them."""

    fixed_sizes: ClassVar[tuple[int, int] | None] = None
    larger: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """The name in tables: as typed, or of a function of the user's."""
        return self.name

    @property
    def code_modules(self) -> tuple[str, ...]:
        """Modules outside of vitsweep that give the images, for the hash of the code."""
        return ()

    def split_sizes(self) -> tuple[int, int] | None:
        """Return the number of training and of held-out images; None where only opening them tells.

        How long a training takes is predicted from them.
        """
        return self.fixed_sizes

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse more images per step than an epoch has, of data with `fixed_sizes`."""
        if self.fixed_sizes:
            yield from image_count_conflicts(cell, *self.fixed_sizes, self.larger)

    def shape_faults(self, cell: "CellSpec") -> Iterator[str]:
        """Yield why the data do not give what the cell says; the model is not tried on it then."""
        return iter(())

    @abstractmethod
    def open(self, cell: "CellSpec", world: "World") -> "Batches":
        """Return the batches of this rank."""


class Batches(ABC):
    """The batches one rank sees, already on its device.

    Images are (B, C, H, W) float32, labels (B,) int64; B is `cell.micro_batch`, images per replica and
    micro-batch.
    All ranks that share a sample (tensor, sequence, pipeline) get the same. The images of step i
    are the same whatever the number of replicas and micro-batches.
    """

    num_train: int
    num_test: int
    prefetched: int = 0
    """Micro-batches that loader workers hold ready; timing begins when they are used up."""

    @abstractmethod
    def train(self, epoch: int, first: int = 0) -> Iterator[tuple[Any, Any]]:
        """Yield the micro-batches of one epoch, shuffled by (seed, epoch), remainder dropped.

        `first` of them are left out: a training goes on in the midst of an epoch.
        """

    @abstractmethod
    def test(self) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of the held-out images; every image on exactly one replica."""

    @property
    def damaged(self) -> dict[str, str]:
        """Path -> why it cannot be read, of the files that this rank has met."""
        return {}

    def close(self) -> None:  # noqa: B027  (most have nothing to stop)
        """Stop loader workers."""


# Reasons for refusing a cell that several data sets share.


def image_count_conflicts(
    cell: "CellSpec", num_train: int, num_test: int, more: str
) -> Iterator[str]:
    """Refuse data with less than one step per epoch, or fewer test images than replicas.

    Args:
        cell: the cell.
        num_train: training images, at least; exact where below `cell.images_per_step`.
        num_test: held-out images, at least; exact where below the number of replicas.
        more: what to change in the data to get more images, as typed.
    """
    if num_train < cell.images_per_step:
        yield (
            f"`batch.images_per_step={cell.batch.images_per_step}` "
            f"(`batch.scope={cell.batch.scope}`) is {cell.images_per_step} images in total, more "
            f"than the {num_train} training images of `data={cell.data.name}`: "
            f"use a smaller batch, or {more}."
        )
    if cell.task.epochs and num_test < cell.mesh.data_parallel_size:
        yield (
            f"`task={cell.task.name}` tests on {num_test} images of `data={cell.data.name}`, fewer "
            f"than the {cell.mesh.data_parallel_size} replicas: use `task=measure`, or {more}."
        )


# How image files are read and decoded.


@dataclass(frozen=True, kw_only=True)
class PixelCache:
    """Where decoded images are kept.

    Attributes:
        folder: one folder per data set and split lies in it; made where missing.
        shorter_side_px: larger images are shrunk to it before they are kept; None keeps all pixels.
    """

    folder: str
    shorter_side_px: int | None


@dataclass(frozen=True, kw_only=True)
class Loader(Technique):
    """How image files are read and decoded while the model trains.

    Itself the default choice: worker processes of torch's DataLoader, each of which reads a micro-batch.

    Images, their order and their random cuts are the same with every loader. `data.num_workers` is the
    number of processes per rank, `data.prefetch_batches` how far they are ahead.
    """

    touches: ClassVar[tuple[str, ...]] = ("data",)

    colour = 0

    @classmethod
    def note(cls, row: Mapping[Any, Any]) -> str:
        """Say how many images a second steps need that wait for files more than 5 % of their time."""
        if not isinstance(row.get("data.folder"), str) or "data_wait_ms" not in row:
            return ""
        share = float(row["data_wait_ms"]) / float(row["step_time_ms"])
        rate = float(row["images_per_second_per_rank"])
        told = (
            f"Steps waited for the loader for {share:.0%} of their time: it gave {rate:,.0f} images/s per "
            f"rank, and {rate / max(1 - share, 0.01):,.0f} are needed."
        )
        return told if share > 0.05 else ""

    @property
    def pixel_cache(self) -> PixelCache | None:
        """Where decoded images are kept; None decodes the files whenever they are read."""
        return None

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse data that are not decoded from files."""
        if self.pixel_cache is not None and not cell.data.decodes_files:
            yield (
                f"`loader={self.name}` reads image files, and `data={cell.data.name}` does not: use "
                "`data=image_folder`, or `loader=workers`."
            )
