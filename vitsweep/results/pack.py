"""`cells/pack.jsonl`: the files of finished cells in one, as `vitsweep pack` writes it.

```
checksum <TAB> cell_id/runs/run_id.json <TAB> record as JSON
checksum <TAB> cell_id/cell.yaml <TAB> text as JSON
checksum <TAB> <TAB> names of the lines that follow
```
The checksum is the CRC-32 of what follows it. Files are named before their lines, so that a line that is
cut off or damaged is known to be missing. A later line of a file replaces an earlier one, but the first
record of a run stays.
"""

import json
import mmap
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from vitsweep.files import NAME, UnsafeFileError, make_durable, open_safely
from vitsweep.foreign import MOST_JSON_BYTES, Bounds, parsed_json

FILE = "pack.jsonl"
MOST_FILES = 2_000_000
"""Of a pack: its lines, and the names in them. 100,000 cells have 400,000 files and one per run."""
OF_CELL = ("cell.yaml", "attempts.jsonl", "record.json", "prediction.json")
"""Files of a cell that a pack may hold, besides the records of its runs."""
_OF_CELL = re.compile(
    rf"{NAME.pattern}/(?:{'|'.join(map(re.escape, OF_CELL))}|runs/{NAME.pattern}\.json)"
)
_TEXT = 9
"""Where a line goes on after its checksum."""

_opened: dict[str, tuple[tuple[int, ...], "Pack"]] = {}


class Pack:
    """A pack as it was when it was opened.

    Args:
        path: of the file; without one it holds nothing.

    Attributes:
        runs: cells of which it holds or held something -> the files of their records, lost ones too.
        is_whole: False where not even the names of files are known whose lines are missing.

    Raises:
        UnsafeFileError: it is a link, or has more files than a pack.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lines: dict[str, tuple[int, int]] = {}
        self.runs: defaultdict[str, list[str]] = defaultdict(list)
        self.is_whole = path is None
        if path is None:
            return
        with open(open_safely(path, os.O_RDONLY), "rb") as handle:
            is_empty = not os.fstat(handle.fileno()).st_size
            self._text: mmap.mmap | bytes = (
                b"" if is_empty else mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
            )
        named, start, lines = set[str](), 0, 0
        while (end := self._text.find(b"\n", start, start + MOST_JSON_BYTES)) >= 0:
            named.update(self._add(start, end))
            start, lines = end + 1, lines + 1
            if max(lines, len(named)) > MOST_FILES:
                raise UnsafeFileError(
                    f"`{path}` has more than {MOST_FILES} lines or names, and is not read: restore it from "
                    "a backup, or remove it."
                )
        self.is_whole = bool(named)
        for name in self._lines.keys() | named:
            cell_id, *_, run = name.split("/")
            names = self.runs[cell_id]
            if "/runs/" in name:
                names.append(run)

    def _add(self, start: int, end: int) -> Sequence[str]:
        """Note where the content of a line is; return what it says about the lines that follow."""
        text = self._text[start + _TEXT : end]
        head, _, content = text.partition(b"\t")
        if self._text[start : start + _TEXT] != b"%08x\t" % zlib.crc32(text):
            return ()
        try:
            name, names = (
                head.decode(),
                () if head else parsed_json(content.decode(), Bounds(MOST_FILES, 1)),
            )
        except ValueError:
            return ()
        if _OF_CELL.fullmatch(name) and ("/runs/" not in name or name not in self._lines):
            self._lines[name] = start + _TEXT + len(head) + 1, end
        listed = names if isinstance(names, list) else []
        return [n for n in listed if isinstance(n, str) and _OF_CELL.fullmatch(n)]

    def __contains__(self, name: str) -> bool:
        return name in self._lines

    def checksum(self, name: str) -> int | None:
        """Return the checksum of the line that holds a file; None where there is none."""
        if name not in self._lines:
            return None
        start = self._lines[name][0] - len(name) - 1 - _TEXT
        return int(self._text[start : start + _TEXT], 16)

    def lacks(self, name: str, content: Any) -> bool:
        """Whether a file is to be added: it is new, or its text is another one."""
        try:
            return name not in self or ("/runs/" not in name and self.text(name) != content)
        except ValueError:
            return True

    def record(self, name: str) -> Any:
        """Return the parsed JSON of a record; ValueError where it is none."""
        start, end = self._lines[name]
        return parsed_json(self._text[start:end].decode())

    def size(self, name: str) -> int:
        """Return how many bytes a file has in the pack."""
        start, end = self._lines[name]
        return end - start

    def text(self, name: str) -> str:
        """Return the text of another file; ValueError where it is none."""
        start, end = self._lines[name]
        if self._text[start : start + 1] == b'"':
            return str(json.loads(self._text[start:end]))
        raise ValueError(f"the line of `{name}` in `{FILE}` holds no text")


def opened(path: Path) -> Pack:
    """Return the pack at a path as it is now, read again if it has changed; an empty one where none is."""
    try:
        found = os.lstat(path)
    except OSError:
        return Pack()
    version = (found.st_ino, found.st_size, found.st_mtime_ns)
    known = _opened.get(str(path))
    if known is None or known[0] != version:
        known = _opened[str(path)] = version, Pack(path)
    return known[1]


def forget(path: Path) -> None:
    """Open the pack at a path anew the next time: NFS shows others' changes of a file that is opened."""
    _opened.pop(str(path), None)


CELLS_AT_ONCE = 100
"""Cells whose files are in memory at once while they are packed."""

Loose = Iterable[tuple[str, tuple[int, ...], Any]]
"""Name, version and content of the files of a cell outside of the pack."""


def write(
    path: Path, before: Pack, cells: Iterable[Loose]
) -> tuple[dict[str, tuple[int, ...]], dict[str, int | None]]:
    """Append what a pack lacks; return name -> version of all files, and of what was written its checksum.

    All of it is on the disk then.
    """
    versions, checksums = dict[str, tuple[int, ...]](), dict[str, int | None]()
    left = iter(cells)
    with open(open_safely(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as handle:
        handle.write(b"\n" * (handle.tell() > 0))  # after a line that was cut in half
        while group := list(islice(left, CELLS_AT_ONCE)):
            found = [file for files in group for file in files]
            checksums |= add(
                handle, {n: content for n, _, content in found if before.lacks(n, content)}
            )
            versions |= {name: version for name, version, _ in found}
    make_durable(path)
    return versions, checksums


def add(handle: BinaryIO, contents: Mapping[str, Any]) -> dict[str, int]:
    """Append files by their names, records as trees and others as texts; return their checksums."""
    checksums = dict[str, int]()
    for name, content in {"": [*contents], **contents}.items() if contents else ():
        text = f"{name}\t{json.dumps(content, separators=(',', ':'))}".encode()
        checksums[name] = zlib.crc32(text)
        handle.write(b"%08x\t%b\n" % (checksums[name], text))
    checksums.pop("", None)
    return checksums
