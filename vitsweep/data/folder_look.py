"""A cheap check of an image folder before the first cell runs.

The check reads the first and last bytes of each file, and decodes those that do not begin and end as their
format wants. Files that are damaged in their midst are found by the ranks, which decode them.
"""

import hashlib
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from vitsweep.data.damaged_images import DAMAGED_LIST, read_damaged, write_damaged
from vitsweep.data.decoded_cache import decode, size_and_time
from vitsweep.data.folder_files import SUFFIXES, Files, class_names, every_file, files
from vitsweep.data.image_folder import ImageFolder
from vitsweep.errors import BadValueError
from vitsweep.files import cache_folder, read_bytes, write_cache_file
from vitsweep.spec.cell_spec import CellSpec

SCREENING_SECONDS = 60.0
"""All checks of a command take no longer; the next command goes on with the files that are left."""
NUM_THREADS = 16
"""They wait for a disk most of the time."""
FILES_AT_ONCE = 256
MANY_FILES = 100_000
"""A check of more files takes seconds, and is announced."""
MOST_NAMES = 20
"""So many files a message names; all are in the list of the sweep."""


@dataclass(frozen=True)
class Look:
    """What is known of the files of one split.

    Attributes:
        folder: of the split.
        num_images: files.
        num_looked: of them, those whose ends were looked at.
        damaged: path -> why it cannot be read.
    """

    folder: str
    num_images: int
    num_looked: int
    damaged: Mapping[str, str]

    def problem(self, data: ImageFolder, place: str) -> str:
        """Return why the split cannot be used, "" where it can; `place` says where all files are named."""
        if len(self.damaged) <= int(data.max_damaged_share * self.num_images):
            return ""
        names = [os.path.relpath(path, self.folder) for path in self.damaged]
        more = ", ..." * (len(names) > MOST_NAMES)
        return (
            f"`data.folder={data.folder}`: {self.share} cannot be read, more than `data.max_damaged_share="
            f"{data.max_damaged_share:g}` allows: {', '.join(names[:MOST_NAMES])}{more}.{place} Restore or "
            "remove them, or raise the share."
        )

    @property
    def share(self) -> str:
        """How many images are damaged, as far as is known."""
        least = "at least " * (self.num_looked < self.num_images)
        split = os.path.basename(self.folder)
        return f"{least}{len(self.damaged)} of {self.num_images} images of `{split}`"


def check_images(cells: Iterable[CellSpec], sweep: Path) -> Iterator[str]:
    """Look at the images that cells read; yield what is to be known of them.

    What cannot be read is named in the list of the sweep, and what is listed there and was mended is not
    any more. A folder that this machine does not see is left to the ranks.

    Args:
        cells: that will run.
        sweep: folder of the sweep.

    Raises:
        BadValueError: more images than `data.max_damaged_share` are damaged.
    """
    wanted = _splits(cells)
    if not wanted:
        return
    until, listed = time.monotonic() + SCREENING_SECONDS, read_damaged(sweep)
    looks = []
    for (folder, split), data in wanted.items():
        found = files.__wrapped__(folder, split)  # a notebook's may have changed
        if len(found) > MANY_FILES:
            yield f"Looking at {len(found)} files in {found.folder}, at most {SCREENING_SECONDS:g} s."
        seen = look(found, until, listed)
        looks.append((data, seen))
        others = {i: why for i, why in listed.items() if not i.startswith(found.folder + os.sep)}
        listed = others | {**seen.damaged}
    write_damaged(sweep, listed)
    place = f" All are named in `{sweep / DAMAGED_LIST}`."
    stays = place * (sweep / "commands.jsonl").exists()  # a new folder is removed again
    if problems := [problem for data, seen in looks if (problem := seen.problem(data, stays))]:
        raise BadValueError("\n".join(problems))
    for _, seen in looks:
        if seen.damaged:
            yield f"Images that cannot be read are skipped: {seen.share}.{place}"
        if seen.num_looked < seen.num_images:
            yield (
                f"{seen.num_looked} of {seen.num_images} files in {seen.folder} were looked at within "
                f"{SCREENING_SECONDS:g} s; the next command goes on."
            )
    yield from reading_notes(cells)


# What is not read, or otherwise than it looks; no more is read, since cells would get other images.


MOST_KINDS = 5
"""So many kinds of files a message names."""
MOST_OPENED = 200
"""Images of a split whose EXIF is read, of all classes alike."""


def reading_notes(cells: Iterable[CellSpec], seconds: float = SCREENING_SECONDS) -> Iterator[str]:
    """Yield which files of the folders that cells read are left out, and what is read as it does not look.

    Args:
        cells: that may run.
        seconds: longest time; then files are counted as far as they were seen.
    """
    until = time.monotonic() + seconds
    for folder, split in _splits(cells):
        place, least, num_rotated = f"`data.folder={folder}`", "", 0
        left_out, opened = Counter[str](), Counter[str]()
        of_class = max(1, MOST_OPENED // len(class_names(folder)))
        for path, why in every_file(folder, split):
            if time.monotonic() > until:
                least = "at least "
                break
            if why:
                left_out[why] += 1
            elif opened.total() < MOST_OPENED and opened[os.path.dirname(path)] < of_class:
                opened[os.path.dirname(path)] += 1
                num_rotated += _is_rotated(path)
        if left_out:
            kinds = [f"{number} {why}" for why, number in left_out.most_common(MOST_KINDS)]
            more = ", ..." * (len(left_out) > MOST_KINDS)
            yield (
                f"{place}: {least}{left_out.total()} files of `{split}` are left out ({', '.join(kinds)}"
                f"{more}): images end in {', '.join(SUFFIXES)} and lie in `{split}/<class>/`."
            )
        if num_rotated:
            yield (
                f"{place}: {num_rotated} of {opened.total()} images of `{split}` that were opened have an "
                "EXIF rotation: they are read as they are stored, not rotated."
            )
        forms = Counter(unicodedata.normalize("NFC", name) for name in class_names(folder))
        if doubled := [name for name, number in forms.items() if number > 1 and split == "train"]:
            yield (
                f"{place}: `train/{doubled[0]}` is there in several Unicode forms (NFC and NFD), which are "
                f"classes of their own ({len(doubled)} such names)."
            )


def _is_rotated(path: str) -> bool:
    try:
        with Image.open(path) as image:
            return image.getexif().get(ExifTags.Base.Orientation, 1) > 1
    except Exception:  # it is damaged, as the check of images says
        return False


def _splits(cells: Iterable[CellSpec]) -> dict[tuple[str, str], ImageFolder]:
    """Return (folder, split) of what cells read -> the data that allow least damage."""
    found: dict[tuple[str, str], ImageFolder] = {}
    for cell in cells:
        data = cell.data
        if (
            isinstance(data, ImageFolder)
            and data.folder
            and Path(data.folder).expanduser().is_dir()
        ):
            for split in data.splits(cell):
                other = found.setdefault((data.folder, split), data)
                found[data.folder, split] = min(other, data, key=lambda d: d.max_damaged_share)
    return found


# The check itself. The user's cache folder keeps the keys of files that are whole.


def look(found: Files, until: float, suspects: Collection[str] = ()) -> Look:
    """Look at the files of a split that have no kept result for their name, size and time of change.

    Args:
        found: the files.
        until: `time.monotonic()` at which the check ends.
        suspects: paths of files that are decoded however they begin and end.
    """
    Image.preinit()  # threads would register Pillow's formats at the same time
    place = hashlib.sha256(os.fsencode(os.path.abspath(found.folder))).hexdigest()[:16]
    kept = cache_folder() / "looks" / place
    try:
        known = {*np.frombuffer(read_bytes(kept), np.uint64).tolist()}
    except (OSError, ValueError):  # there is none, or a damaged one
        known = set()
    looks = partial(_look_at, found, known, until, suspects)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        looked = list(pool.map(looks, range(0, len(found), FILES_AT_ONCE)))
    damaged = {path: why for _, of_part in looked for path, why in of_part.items()}
    whole = {key for keys, _ in looked for key in keys}
    num_looked = len(whole) + len(damaged)
    if num_looked < len(found):
        whole |= known
    write_cache_file(kept, np.array([*whole], np.uint64).tobytes())
    return Look(found.folder, len(found), num_looked, dict(sorted(damaged.items())))


def _look_at(
    found: Files, known: Collection[int], until: float, suspects: Collection[str], first: int
) -> tuple[list[int], dict[str, str]]:
    """Look at some files; return the keys of those that are whole, and path -> what is wrong."""
    whole: list[int] = []
    damaged: dict[str, str] = {}
    for row in range(first, min(first + FILES_AT_ONCE, len(found))):
        if time.monotonic() > until:
            break
        path = found.path(row)
        key = _key(path)
        has_ends = path not in suspects and (key in known or _has_both_ends(path))
        if not has_ends and isinstance(why := decode(path), str):
            damaged[path] = why
        else:
            whole.append(key)
    return whole, damaged


def _key(path: str) -> int:
    """Return a hash of the name, size and time of change of a file."""
    state = os.fsencode(path) + b"\0%d %d" % size_and_time(path)
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")


ENDS = {
    b"\xff\xd8\xff": b"\xff\xd9",  # JPEG (ITU-T T.81, B.1.1.3): start and end of image
    b"\x89PNG\r\n\x1a\n": b"IEND\xaeB`\x82",  # PNG (RFC 2083, 3.1 and 4.1.4)
}
"""First bytes of a format -> its last ones; files of other formats are decoded."""


def _has_both_ends(path: str) -> bool:
    """Return whether a file begins and ends as an image does; False also where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(16)
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16))
            tail = file.read(16)
    except OSError:
        return False
    return any(head.startswith(first) and tail.endswith(last) for first, last in ENDS.items())
