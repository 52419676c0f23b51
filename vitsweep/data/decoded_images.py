"""Pixels of decoded images in one file, mapped into memory by all who read them."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitsweep.data.folder_scan import Files
from vitsweep.data.image_crop import decode
from vitsweep.errors import BadValueError
from vitsweep.spec.host import PixelCache

LOG = logging.getLogger(__name__)
PIXELS, INDEX, FACTS = "pixels.bin", "index.npz", "facts.json"
LAYOUT = 1
"""Number of the layout of these files; another one is made anew."""
CHANNELS = 3


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
        self._damaged: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        DecodedImages.__init__(self, state["folder"])

    def image(self, row: int) -> Image.Image | str:
        """Return an image as RGB, or why its file could not be read."""
        if self._pixels is None:
            self._open()
        height, width = self._sizes[row].tolist()
        if not height:
            return self._damaged[str(row)]
        start = self._starts[row]
        pixels = self._pixels[start : start + height * width * CHANNELS]
        return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)

    def _open(self) -> None:
        with np.load(self.folder / INDEX) as index:
            self._starts, self._sizes = index["starts"], index["sizes"]
        self._damaged = _facts(self.folder)["damaged"]
        path = self.folder / PIXELS
        empty = not path.stat().st_size  # nothing can be mapped
        self._pixels = np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")


def decoded_images(files: Files, cache: PixelCache) -> DecodedImages:
    """Return the pixels of a split; whoever comes first decodes them, and all others wait for it.

    Raises:
        BadValueError: other images were decoded than are there now, and `cache.remake` is False.
        OSError: the pixels cannot be written.
    """
    folder = Path(cache.folder).expanduser() / _name(files, cache.shorter_side_px)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        difference = _difference(folder, files)
        if difference and folder.exists() and not cache.remake:
            raise BadValueError(
                f"`loader.folder={cache.folder}` keeps pixels of other images than {files.folder} "
                f"holds now ({difference}): `loader.remake=true` decodes them anew, another "
                "`loader.folder` keeps both."
            )
        if difference:
            _make(folder, files, cache.shorter_side_px)
    return DecodedImages(folder)


def _name(files: Files, shorter_side_px: int | None) -> str:
    """Return the name of a folder: one per split and size."""
    split = Path(files.folder).absolute()
    place = hashlib.sha256(os.fsencode(split)).hexdigest()[:8]
    return f"{split.parent.name}-{split.name}-{shorter_side_px or 'all'}px-{place}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time look at a folder and make it."""
    with open(folder.with_name(folder.name + ".lock"), "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks: two may decode, one of them in vain
            LOG.warning("%s cannot be locked (%s).", lock.name, error)
        yield


def _difference(folder: Path, files: Files) -> str:
    """Return how the decoded images differ from the files, "" where they do not."""
    try:
        facts = _facts(folder)
        with np.load(folder / INDEX) as index:
            kept = {key: index[key] for key in ("names", "labels", "bytes", "changed")}
    except (OSError, ValueError, KeyError) as error:
        return f"its index cannot be read: {error}"
    if facts.get("layout") != LAYOUT or facts.get("classes") != list(files.classes):
        return "other classes"
    now = _state(files)
    if len(kept["names"]) != len(files):
        return f"{len(kept['names'])} images were decoded, and there are {len(files)}"
    differs = np.zeros(len(files), bool)
    for key, value in kept.items():
        differs |= value != now[key]
    if not differs.any():
        return ""
    first = files.path(int(np.flatnonzero(differs)[0]))
    return f"{int(differs.sum())} of {len(files)} differ, such as {first}"


def _state(files: Files) -> dict[str, NDArray[Any]]:
    """Return names, labels, sizes in bytes and times of change of all files."""
    found = np.array([_size_and_time(files.path(row)) for row in range(len(files))], np.int64)
    found = found.reshape(-1, 2)
    return {
        "names": files.names,
        "labels": files.labels,
        "bytes": found[:, 0],
        "changed": found[:, 1],
    }


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return -1, -1  # as for any other damage, the reader of the file says why
    return found.st_size, found.st_mtime_ns


def _facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return facts


def _make(folder: Path, files: Files, shorter_side_px: int | None) -> None:
    """Decode all files into a folder beside, and rename it: nobody sees half of it."""
    state = _state(files)  # before: a file that changes meanwhile is found to differ later
    beside = folder.with_name(f"{folder.name}.{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    LOG.warning("Decoding %d images of %s, once, into %s.", len(files), files.folder, folder)
    try:
        sizes, damaged = _write_pixels(beside / PIXELS, files, shorter_side_px)
        ends = np.cumsum(sizes.prod(1, dtype=np.int64) * CHANNELS)
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(files)]
        np.savez(beside / INDEX, **(state | {"starts": starts, "sizes": sizes}))  # type: ignore[arg-type]
        facts = {"layout": LAYOUT, "classes": files.classes, "damaged": damaged}
        (beside / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        old = beside.with_name(beside.name + ".old")
        if folder.exists():
            folder.rename(old)  # who has mapped it keeps its pixels
        beside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_pixels(
    path: Path, files: Files, shorter_side_px: int | None
) -> tuple[NDArray[np.int64], dict[str, str]]:
    """Write all pixels; return height and width of each image, and row -> why it has none."""
    sizes: NDArray[np.int64] = np.zeros((len(files), 2), np.int64)
    damaged: dict[str, str] = {}
    with open(path, "wb") as file:
        for row, pixels in enumerate(_decoded_in_order(files, shorter_side_px)):
            if isinstance(pixels, str):
                damaged[str(row)] = pixels
            else:
                sizes[row] = pixels.shape[:2]
                file.write(pixels.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return sizes, damaged


def _decoded_in_order(
    files: Files, shorter_side_px: int | None
) -> Iterator[NDArray[np.uint8] | str]:
    """Yield what `_pixels` returns for each file; threads on all cores of this process are ahead."""
    Image.preinit()  # threads would register Pillow's formats at the same time
    num_threads = len(os.sched_getaffinity(0))
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
