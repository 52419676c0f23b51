"""The list of a sweep's images that cannot be read: `damaged_images.jsonl`, a line for each.

A module of its own: cells that read no image folder run this code, and none of the readers.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vitsweep.files import append_line, remove, write_atomically
from vitsweep.foreign import foreign, read_lines

DAMAGED_LIST = "damaged_images.jsonl"
"""In a sweep's folder: `image`, a path, and `reason`."""
OF_RANK = "damaged-{}.json"
"""In the folder of an attempt: path -> reason of each image that a rank could not read."""


def read_damaged(sweep: Path) -> dict[str, str]:
    """Return path -> reason of the images that are listed."""
    lines = read_lines(sweep / DAMAGED_LIST)
    return {str(line.get("image")): str(line.get("reason")) for line in lines}


def write_damaged(sweep: Path, found: Mapping[str, str]) -> None:
    """List these images and no others; there is no list of none."""
    lines = (json.dumps({"image": image, "reason": why}) + "\n" for image, why in found.items())
    if found:
        write_atomically(sweep / DAMAGED_LIST, "".join(lines))
    else:
        remove(sweep / DAMAGED_LIST)


@contextmanager
def named_damage(
    damaged: Callable[[], Mapping[str, str]], folder: Path, rank: int
) -> Iterator[None]:
    """Leave what a rank could not read in the folder of its attempt, however the run ends."""
    try:
        yield
    finally:
        if found := damaged():
            with suppress(OSError):  # a full disk, which the run itself will say
                write_atomically(folder / OF_RANK.format(rank), json.dumps(found))


def list_damaged(sweep: Path, attempt: Path) -> None:
    """List what the ranks of an attempt could not read, each image once."""
    for path in sorted(attempt.glob(OF_RANK.format("*"))):
        with suppress(OSError, ValueError):
            found = foreign(path)
            for image in found.keys() - read_damaged(sweep).keys() if type(found) is dict else ():
                append_line(sweep / DAMAGED_LIST, {"image": image, "reason": str(found[image])})
        remove(path)
