"""Kinds of technique that work on the host, beside the model: reading images, settings of a process."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.errors import VitsweepError
from vitsweep.spec.technique import Technique

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class PixelCache:
    """Where decoded images are kept.

    Attributes:
        folder: one folder per data set and split lies in it; made where missing.
        shorter_side_px: larger images are shrunk to it before they are kept; None keeps all pixels.
        remake: True decodes anew where the kept pixels are of other images; False refuses them.
    """

    folder: str
    shorter_side_px: int | None
    remake: bool


@dataclass(frozen=True, kw_only=True)
class Loader(Technique):
    """How image files are read and decoded while the model trains.

    Itself the plain choice: worker processes of torch's DataLoader, each of which reads a micro-batch.

    Images, their order and their random cuts are the same with every loader. `data.num_workers` is the
    number of processes or threads per rank, `data.prefetch_batches` how far they are ahead.

    Attributes:
        reads_in: processes or threads that read.
    """

    colour = 0

    reads_in: ClassVar[Literal["processes", "threads"]] = "processes"

    @property
    def pixel_cache(self) -> PixelCache | None:
        """Where decoded images are kept; None decodes the files whenever they are read."""
        return None

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse data that are not decoded from files."""
        own_way = self.reads_in != "processes" or self.pixel_cache is not None
        if own_way and not cell.data.decodes_files:
            yield (
                f"`loader={self.name}` reads image files, and `data={cell.data.name}` does not: use "
                "`data=image_folder`, or `loader=workers`."
            )


class Runtime(Technique):
    """Settings of a rank's process and of its host, under which the same model trains.

    Itself the plain choice: cores, memory and garbage collection are as the system gives them, but that
    Python collects no garbage within the timed steps.
    """

    colour = 1

    collects_garbage: ClassVar[Literal["paused", "automatic", "scheduled"]] = "paused"
    """When Python looks for objects in cycles: `paused` does so outside of the timed steps."""

    @property
    def collect_every_steps(self) -> int:
        """Steps between two collections where they are scheduled."""
        return 0

    def environment(self) -> Mapping[str, str]:
        """Variables that a rank must find when it starts; the ranks are new processes then."""
        return {}

    def set_up(self, cell: "CellSpec", local_rank: int) -> None:
        """Prepare the process of a rank, before it joins the others.

        Raises:
            VitsweepError: the node lacks what is needed.
        """
        for reason in self.lacking_here(cell):
            raise VitsweepError(reason)
