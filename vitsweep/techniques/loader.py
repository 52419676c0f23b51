"""Image files read from a file of decoded pixels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Gt

from vitsweep.spec.data import Loader, PixelCache

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class DecodedCache(Loader):
    """Images are decoded once, into a file of pixels that cells and ranks of a node map into memory.

    The idea is that of FFCV (arXiv:2306.12517). The pixels are those that Pillow decodes, so that
    batches equal those of `loader=workers` bit by bit, unless `shorter_side_px` shrinks the images. Three
    bytes per pixel lie on the disk: ImageNet-1k takes about 700 GB as it is, and about 260 GB with
    `shorter_side_px=256`.

    Attributes:
        folder: where the files of pixels are kept, one folder per data set and split; made where missing.
        shorter_side_px: larger images are shrunk to it (bilinear) before they are kept; None keeps all
            pixels.
        remake: False; it keeps the ids of cells from when damaged pixels could be decoded anew by it.
    """

    folder: str
    shorter_side_px: Annotated[int, Gt(0)] | None
    remake: Literal[False] = False

    @property
    def pixel_cache(self) -> PixelCache:
        """Where decoded images are kept."""
        return PixelCache(folder=self.folder, shorter_side_px=self.shorter_side_px)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse kept images that are smaller than what is cut out of them."""
        yield from super().conflicts(cell)
        side = cell.batch.resolution_px
        if self.shorter_side_px is not None and self.shorter_side_px < side:
            yield (
                f"`loader.shorter_side_px={self.shorter_side_px}` is less than "
                f"`batch.resolution_px={side}`, the side of what is cut out of the kept images: use at "
                f"least {side}, or null."
            )
