"""`runs.index`: the records of a sweep once more in one file, read instead of one file per run.

```
checksum <TAB> cell_id/runs/run_id.json <TAB> size <TAB> mtime_ns <TAB> schema <TAB> record as JSON
```
The files under `cells/` stay the truth: a line counts only while its file has the same size and time
of change, and its checksum (CRC-32 of the JSON) fits. So the index may be deleted at any time, a line
that a crash cut in half is ignored, and a reader without it finds the same records, only more slowly.
"""

import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitsweep.files import UnsafeFileError, open_safely

FILE = "runs.index"
MIN_NEW_RECORDS = 200
"""Fewer records than this are not worth a write: so many files are read in a fraction of a second."""


class Version(NamedTuple):
    """What tells whether a file has changed."""

    size: int
    mtime_ns: int


class _Line(NamedTuple):
    version: Version
    checksum: int
    start: int
    end: int


class RecordIndex:
    """The index of one sweep folder, as it was when it was opened.

    Args:
        folder: of the sweep.
        schema: version of the records that are wanted; lines of another one are ignored.
    """

    def __init__(self, folder: Path, schema: int) -> None:
        self._path, self._schema = folder / FILE, schema
        self._lines: dict[str, _Line] = {}
        self._text: mmap.mmap | bytes = b""
        try:
            with open(open_safely(self._path, os.O_RDONLY), "rb") as handle:
                self._text = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # there is none, or it is empty
            return
        start = 0
        while (end := self._text.find(b"\n", start)) >= 0:
            self._add(start, end)
            start = end + 1

    def __len__(self) -> int:
        return len(self._lines)

    def _add(self, start: int, end: int) -> None:
        fields = self._text[start : min(end, start + 400)].split(b"\t", 5)
        try:
            checksum, name, size, mtime_ns, schema, _ = fields
            if int(schema) == self._schema:
                record = start + sum(map(len, fields[:5])) + 5
                version = Version(int(size), int(mtime_ns))
                self._lines[name.decode()] = _Line(version, int(checksum, 16), record, end)
        except ValueError:
            return  # cut in half

    def record(self, name: str, version: Version) -> dict[str, Any] | None:
        """Return the parsed JSON of a record, or None where its own file must be read.

        Args:
            name: `<cell_id>/runs/<run_id>.json`.
            version: of that file now.
        """
        line = self._lines.get(name)
        if line is None or line.version != version:
            return None
        text = self._text[line.start : line.end]
        if zlib.crc32(text) != line.checksum:
            return None
        tree: dict[str, Any] = json.loads(text)
        return tree

    def append(self, records: Iterable[tuple[str, Version, Mapping[str, Any]]]) -> None:
        """Add records; where another process is doing so, or nothing can be written, do nothing.

        Args:
            records: name, version of the file, and content of each.
        """
        lines = [_line(name, version, self._schema, tree) for name, version, tree in records]
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            with open(open_safely(self._path, flags), "ab+") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = handle.seek(0, os.SEEK_END)
                if size:
                    handle.seek(size - 1)
                    lines.insert(0, b"\n" * (handle.read(1) != b"\n"))
                handle.writelines(lines)
        except UnsafeFileError:
            raise
        except OSError:
            return


def _line(name: str, version: Version, schema: int, tree: Mapping[str, Any]) -> bytes:
    text = json.dumps(tree, separators=(",", ":")).encode()
    head = f"{zlib.crc32(text):08x}\t{name}\t{version.size}\t{version.mtime_ns}\t{schema}\t"
    return head.encode() + text + b"\n"
