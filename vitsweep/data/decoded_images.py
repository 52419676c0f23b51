"""Pixels of decoded images in one file, mapped into memory by all who read them.

The checksum of an image is compared when a process first reads it (see `decoded_cache` for the rest).
"""

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsweep.errors import BadValueError

PIXELS, INDEX, FACTS = "pixels.bin", "index.npz", "facts.json"
CHANNELS = 3
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error
)  # fmt: skip
"""What JSON, NumPy and zipfile raise for damaged files."""
OF_FILES, OF_PIXELS = ("names", "labels", "bytes", "changed"), ("starts", "sizes", "checksums")
"""Arrays of the index: what was decoded, and what came of it."""


class DecodedImages:
    """Decoded images of one split; each process opens the files when it first reads an image.

    Args:
        folder: holds `pixels.bin` (rows, columns and channels of one image after the other, uint8), its
            index and what it was made from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pixels: Any = None
        self._starts: Any = None
        self._sizes: Any = None
        self._checksums: Any = None
        self._is_checked: Any = None
        self._damaged: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DecodedImages.__init__(self, state["folder"])

    def image(self, row: int) -> Image.Image | str:
        """Return an image as RGB, or why its file could not be read.

        Raises:
            BadValueError: these files are damaged.
        """
        if self._pixels is None:
            self._open()
        height, width = self._sizes[row].tolist()
        if not height:
            return self._damaged[str(row)]
        pixels = self._of_row(row)
        if not self._is_checked[row]:
            if zlib.crc32(pixels) != self._checksums[row]:
                raise _damage(self.folder, f"image {row} of {PIXELS} is not what was written")
            self._is_checked[row] = True
        return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)

    def difference(self, rows: Iterator[int]) -> str:
        """Return which of `rows` have other pixels than were written, "" where none has."""
        self._open()
        wrong = [row for row in rows if zlib.crc32(self._of_row(row)) != self._checksums[row]]
        first = f", the first of them {wrong[0]}" if wrong else ""
        return f"{len(wrong)} images of {PIXELS} are not what was written{first}" if wrong else ""

    def _of_row(self, row: int) -> Any:
        start = self._starts[row]
        return self._pixels[start : start + self._sizes[row].prod() * CHANNELS]

    def _open(self) -> None:
        try:
            self._starts, self._sizes, self._checksums = arrays_of(self.folder, OF_PIXELS).values()
            self._damaged = facts_of(self.folder)["damaged"]
            path = self.folder / PIXELS
            empty = not path.stat().st_size  # nothing can be mapped
            self._pixels = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
        except UNREADABLE as error:
            raise _damage(self.folder, f"{error}") from error
        self._is_checked = np.zeros(len(self._sizes), bool)


def _damage(folder: Path, what: str) -> BadValueError:
    return BadValueError(
        f"`loader.folder`: the decoded images in {folder} are damaged ({what}): `loader.remake=true` "
        "decodes them anew, once."
    )


def arrays_of(folder: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return some arrays of the index; raises any of `UNREADABLE`."""
    # np.load alone leaves a damaged file open
    with (folder / INDEX).open("rb") as file, np.load(file) as index:
        return {name: index[name] for name in names}


def facts_of(folder: Path) -> dict[str, Any]:
    """Return what the pixels were made from; raises any of `UNREADABLE`."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise ValueError(f"{FACTS} is {facts!r:.40}")
    return facts
