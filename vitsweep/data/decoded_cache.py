"""A folder of decoded images: made once, checked, shared by cells and ranks.

What is checked, since a disk can lose what was written and people copy files: the size of the file and the
checksums of `SAMPLE` images spread over it whenever a process opens it; the checksum of every image
when a process first reads it.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray
from PIL import Image

from vitsweep.control_group import allowed_cores
from vitsweep.data.folder_files import Files
from vitsweep.errors import BadValueError
from vitsweep.spec.data import PixelCache

# How an image of any format becomes pixels, and which part of it a training or test image.

ATTEMPTS = 10
"""How often a random part is drawn before the centre is taken, as in torchvision."""


class Box(NamedTuple):
    """A crop in pixels of the image; edges may lie between pixels."""

    left: float
    top: float
    right: float
    bottom: float


def random_box(width: int, height: int, smallest_share: float, random: np.random.Generator) -> Box:
    """Draw a crop of `smallest_share` to 1 of the area with an aspect ratio of 3:4 to 4:3.

    The method of torchvision's RandomResizedCrop; an image too long for any of it gives its centre.
    """
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(smallest_share, 1.0)
        ratio = exp(random.uniform(log(3 / 4), log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = random.integers(width - w + 1), random.integers(height - h + 1)
            return Box(left, top, left + w, top + h)
    ratio = min(max(width / height, 3 / 4), 4 / 3)
    return _centred(width, height, min(width, height * ratio), min(height, width / ratio))


def centre_box(width: int, height: int, share: float) -> Box:
    """Return the centred square with `share` of the shorter side."""
    side = share * min(width, height)
    return _centred(width, height, side, side)


def _centred(width: int, height: int, w: float, h: float) -> Box:
    left, top = (width - w) / 2, (height - h) / 2
    return Box(left, top, left + w, top + h)


def decode(path: str) -> Image.Image | str:
    """Return an image file as RGB, or why it cannot be read."""
    try:
        with Image.open(path) as file:
            return as_rgb(file)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged bytes
        return str(error) or type(error).__name__


def as_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits per channel; one grey channel of 16 bits keeps its range.

    Pillow's own `convert` clips 16 bits at 255, which turns nearly all pixels white. It gives such
    images the modes `I;16` (PNG, TIFF) and `I` (PGM).

    Raises:
        ValueError: the pixels are floats, whose range no file states.
    """
    if image.mode == "F":
        raise ValueError(
            "its pixels are floats, whose range is unknown: convert it to 8 or 16 bits"
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        high_bytes = np.clip(np.asarray(image), 0, 2**16 - 1) >> 8
        return Image.fromarray(high_bytes.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def cut(image: Image.Image, box: Box, side: int, mirrored: bool = False) -> NDArray[np.uint8]:
    """Crop an RGB image and resize it bilinearly to (side, side, 3)."""
    small = image.resize((side, side), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(small)
    return pixels[:, ::-1] if mirrored else pixels


# Pixels of decoded images in one file, mapped into memory by all who read them.
#
# The checksum of an image is compared when a process first reads it (see `decoded_cache` for the rest).


PIXELS, INDEX, FACTS = "pixels.bin", "index.npz", "facts.json"
CHANNELS = 3
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error
)  # fmt: skip
"""What JSON, NumPy and zipfile raise for damaged files."""
ARRAYS = ("starts", "sizes", "checksums")
"""Of the index: one number of each image."""


class DecodedImages:
    """Decoded images of one split; each process opens the files when it first reads an image.

    Args:
        folder: holds `pixels.bin` (rows, columns and channels of one image after the other, uint8), its
            index and what it was made from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def image(self, row: int) -> Image.Image | str:
        """Return an image as RGB, or why its file could not be read.

        Raises:
            BadValueError: these files are damaged.
        """
        found = self._found
        height, width = found.sizes[row].tolist()
        if not height:
            return found.damaged[str(row)]
        pixels = found.of_row(row)
        if not found.is_checked[row]:
            if zlib.crc32(pixels) != found.checksums[row]:
                raise _damage(self.folder, f"image {row} of {PIXELS} is not what was written")
            found.is_checked[row] = True
        return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)

    def difference(self, rows: Iterator[int]) -> str:
        """Return which of `rows` have other pixels than were written, "" where none has."""
        found = self._found
        wrong = [row for row in rows if zlib.crc32(found.of_row(row)) != found.checksums[row]]
        first = f", the first of them {wrong[0]}" if wrong else ""
        return f"{len(wrong)} images of {PIXELS} are not what was written{first}" if wrong else ""

    @cached_property
    def _found(self) -> "_Found":
        try:
            # np.load alone leaves a damaged file open
            with (self.folder / INDEX).open("rb") as file, np.load(file) as kept:
                index = {name: kept[name] for name in ARRAYS}
            path, damaged = self.folder / PIXELS, facts_of(self.folder)["damaged"]
            empty = not path.stat().st_size  # nothing can be mapped
            pixels = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
        except UNREADABLE as error:
            raise _damage(self.folder, f"{error}") from error
        return _Found(
            pixels, **index, damaged=damaged, is_checked=np.zeros(len(index["sizes"]), bool)
        )


class _Found(NamedTuple):
    """What a process reads of the files."""

    pixels: Any
    starts: Any
    sizes: Any
    checksums: Any
    damaged: dict[str, str]
    is_checked: Any

    def of_row(self, row: int) -> Any:
        start = self.starts[row]
        return self.pixels[start : start + self.sizes[row].prod() * CHANNELS]


def _damage(folder: Path, what: str) -> BadValueError:
    return BadValueError(
        f"`loader.folder`: the decoded images in {folder} are damaged ({what}): remove that folder to decode "
        "anew."
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """Return what the pixels were made from; raises any of `UNREADABLE`."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    if not isinstance(facts, dict):
        raise ValueError(f"{FACTS} is {facts!r:.40}")
    return facts


LOG = logging.getLogger(__name__)
LAYOUT = 3
"""Number of the layout of these files; another one is refused, or made anew."""
SAMPLE = 64
"""Images whose checksums are compared whenever a process opens the files."""


def decoded_images(files: Files, cache: PixelCache) -> DecodedImages:
    """Return the pixels of a split; whoever comes first decodes them, and all others wait for it.

    Finished pixels are read without a lock, so that their folder may be read-only.

    Raises:
        BadValueError: what is kept is damaged or of other images than are there now, or `cache.folder`
            cannot hold it.
        OSError: the pixels cannot be written.
    """
    folder = Path(cache.folder).expanduser() / _name(files, cache.shorter_side_px)
    if not (difference := _difference(folder, files)):
        return DecodedImages(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_name(folder.name + ".lock"), "a", encoding="utf-8")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise BadValueError(
            f"`loader.folder={cache.folder}`: the decoded images in {folder} cannot be used ({difference}), "
            f"and none can be written there ({error}): name a folder that can be written."
        ) from error
    with lock:
        with suppress(OSError):  # without locks two may decode, one of them in vain
            fcntl.flock(lock, fcntl.LOCK_EX)
        difference = _difference(folder, files)  # another process may have made it
        if difference and folder.exists():
            raise BadValueError(
                f"`loader.folder={cache.folder}`: the decoded images in {folder} are not those of "
                f"{files.folder} as it is now: {difference}. Remove that folder to decode anew; another "
                "`loader.folder` keeps both."
            )
        if difference:
            # of processes that died
            name = re.compile(re.escape(f"{folder.name}.{socket.gethostname()}-") + r"(\d+)")
            for path in folder.parent.iterdir():
                if (match := name.fullmatch(path.name)) and not psutil.pid_exists(int(match[1])):
                    shutil.rmtree(path, ignore_errors=True)
            _make(folder, files, cache.shorter_side_px)
    return DecodedImages(folder)


def _name(files: Files, shorter_side_px: int | None) -> str:
    """Return the name of a folder: one per split and size."""
    split = Path(files.folder).absolute()
    place = hashlib.sha256(os.fsencode(split)).hexdigest()[:8]
    return f"{split.parent.name}-{split.name}-{shorter_side_px or 'all'}px-{place}"


def _difference(folder: Path, files: Files) -> str:
    """Return how the decoded images differ from the files or from what was written, "" where they do not."""
    try:
        facts = facts_of(folder)
        if facts.get("layout") != LAYOUT:
            return "another version of vitsweep decoded them"
        num_bytes, found = int(facts["pixel_bytes"]), (folder / PIXELS).stat().st_size
        damaged = dict(facts["damaged"])
    except UNREADABLE as error:
        return f"they cannot be read ({type(error).__name__}: {error})"
    if found != num_bytes:
        return f"{PIXELS} has {found} bytes, and {num_bytes} were written"
    if facts.get("files") != _state(files):
        return "files were added, removed or changed, or classes are others"
    step = max(1, len(files) // SAMPLE)
    readable = (row for row in range(0, len(files), step) if str(row) not in damaged)
    return DecodedImages(folder).difference(readable)


def _state(files: Files) -> str:
    """Return a hash of classes, names, labels, sizes in bytes and times of change of all files."""
    found = hashlib.sha256(repr(files.classes).encode())
    states = np.array([size_and_time(files.path(row)) for row in range(len(files))], np.int64)
    for array in (files.names, files.labels, states):
        found.update(array.tobytes())
    return found.hexdigest()


def size_and_time(path: str) -> tuple[int, int]:
    """Return size in bytes and time of change in ns of a file; -1 of one that cannot be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1  # as for any other damage, the reader of the file says why
    return found.st_size, found.st_mtime_ns


def _make(folder: Path, files: Files, shorter_side_px: int | None) -> None:
    """Decode all files into a folder next to it, and rename it: nobody sees half of it."""
    state = _state(files)  # before: a file that changes meanwhile is found to differ later
    beside = folder.with_name(f"{folder.name}.{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    LOG.warning("Decoding %d images of %s, once, into %s.", len(files), files.folder, folder)
    try:
        sizes, checksums, damaged = _write_pixels(beside / PIXELS, files, shorter_side_px)
        ends = np.cumsum(sizes.prod(1, dtype=np.int64) * CHANNELS)
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(files)]
        np.savez(beside / INDEX, starts=starts, sizes=sizes, checksums=checksums)
        num_bytes = (beside / PIXELS).stat().st_size
        facts = {
            "layout": LAYOUT,
            "files": state,
            "damaged": damaged,
            "pixel_bytes": num_bytes,
        }
        (beside / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        if not folder.exists():  # without locks another process may have made it
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_pixels(
    path: Path, files: Files, shorter_side_px: int | None
) -> tuple[NDArray[np.int64], NDArray[np.uint32], dict[str, str]]:
    """Write all pixels; return height, width and CRC-32 of each image, and row -> why it has none."""
    sizes: NDArray[np.int64] = np.zeros((len(files), 2), np.int64)
    checksums: NDArray[np.uint32] = np.zeros(len(files), np.uint32)
    damaged: dict[str, str] = {}
    with open(path, "wb") as file:
        for row, pixels in enumerate(_decoded_in_order(files, shorter_side_px)):
            if isinstance(pixels, str):
                damaged[str(row)] = pixels
            else:
                sizes[row] = pixels.shape[:2]
                content = pixels.tobytes()
                checksums[row] = zlib.crc32(content)
                file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return sizes, checksums, damaged


def _decoded_in_order(
    files: Files, shorter_side_px: int | None
) -> Iterator[NDArray[np.uint8] | str]:
    """Yield what `_pixels` returns for each file; threads on all cores of this process are ahead."""
    Image.preinit()  # threads would register Pillow's formats at the same time
    num_threads = allowed_cores()
    ahead: deque[Future[NDArray[np.uint8] | str]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for row in range(len(files)):
            ahead.append(pool.submit(_pixels, files.path(row), shorter_side_px))
            if len(ahead) > 4 * num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _pixels(path: str, shorter_side_px: int | None) -> NDArray[np.uint8] | str:
    """Return the pixels (H, W, 3) of a file, or why it cannot be read."""
    image = decode(path)
    if isinstance(image, str):
        return image
    if shorter_side_px is not None and min(image.size) > shorter_side_px:
        share = shorter_side_px / min(image.size)
        size = (round(image.width * share), round(image.height * share))
        image = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image)
