"""The archive of a bundle: written the same for the same files, read without trust in whoever wrote it."""

import gzip
import hashlib
import os
import re
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.files import (
    MOST_BYTES,
    NAME,
    guard,
    read_bytes,
    read_text,
    replacing,
    write_atomically,
)

SUMS = "SHA256SUMS"
MOST_ENTRIES, MOST_TOTAL_BYTES, MOST_AT_ONCE = 200_000, 2**33, 2**24
"""A larger archive is refused; so is a header that would be read into memory at once."""

_PLACES = (
    SUMS, "claims.json", "packages.txt", "commands.jsonl", "race.json", "cells.csv",
    r"(cells|runs|samples|replicates)\.parquet", r"replicates\.csv",
    r"code/\w+\.(diff|json)", r"figures/\w+\.svg",
    r"cells/[^/]+/(cell\.yaml|attempts\.jsonl|(record|prediction)\.json)",
    r"cells/[^/]+/runs/[^/]+\.json",
    r"cells/[^/]+/attempts/[^/]+/([^/]+\.log|failure-\d+\.json)",
)  # fmt: skip
_PLACE = re.compile("|".join(f"(?:{place})" for place in _PLACES))


def is_bundled(name: str) -> bool:
    """Whether a file of a sweep folder, named by its path in it, belongs into a bundle."""
    return _PLACE.fullmatch(name) is not None and all(map(NAME.fullmatch, name.split("/")))


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder by their paths in it, in order; links are not followed."""
    found = [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(found)


def checksums(folder: Path) -> str:
    """Return a line per file, as `sha256sum` writes and reads them."""
    names = [name for name in files_of(folder) if name != SUMS]
    return "".join(
        f"{hashlib.sha256(read_bytes(folder / name)).hexdigest()}  {name}\n" for name in names
    )


def _sums(lines: Iterable[str]) -> dict[str, str]:
    parts = (line.partition("  ") for line in lines)
    return {name: digest for digest, _, name in parts if name}


def checksum_faults(folder: Path) -> list[str]:
    """Return what a folder holds beside what its list of checksums says."""
    try:
        lines = read_text(folder / SUMS).splitlines()
    except (OSError, ValueError):
        return [f"`{SUMS}` is missing or no text."]
    said, found = (_sums(text) for text in (lines, checksums(folder).splitlines()))
    names = sorted(said.keys() | found.keys())
    return [
        f"`{name}` "
        + ("has another checksum." if name in said and name in found else
           "is missing." if name in said else f"is not in `{SUMS}`.")
        for name in names
        if said.get(name) != found.get(name)
    ]  # fmt: skip


def write_archive(folder: Path, to: Path) -> None:
    """Write a folder as `.tar.gz`; the same files give the same bytes, whoever writes them when."""
    write_atomically(folder / SUMS, checksums(folder))
    with (
        replacing(to) as file,
        gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
        tarfile.TarFile(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in files_of(folder):
            entry = tarfile.TarInfo(f"{folder.name}/{name}")
            entry.mode, entry.size = 0o644, (folder / name).stat().st_size
            with open(folder / name, "rb") as content:
                archive.addfile(entry, content)


class _Bounded:
    """A compressed file from which tarfile can read neither without end nor much at once."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_AT_ONCE or self._file.tell() > MOST_TOTAL_BYTES:
            raise VitsweepError("it is too large, or a header in it is")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def extract(archive: Path, folder: Path) -> Path:
    """Write the files of a bundle below a new, empty folder; return the sweep folder among them.

    Links, devices, pipes, sparse files, absolute and `..` paths, names that are given twice or differ by
    case alone, what is no file of a bundle, and what is too large are refused, besides all that the
    `data` filter of tarfile refuses (PEP 706). Nothing that was extracted is ever imported or run.

    Raises:
        VitsweepError: the archive is no bundle or is damaged, or an entry is refused.
        OSError: it cannot be read, or the folder not written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise VitsweepError(
            "Bundles are read with Python 3.11.4 or newer, whose tarfile has filters."
        )
    seen: set[str] = set()
    tops: set[str] = set()
    try:
        with (
            gzip.GzipFile(archive) as packed,
            tarfile.TarFile(fileobj=_Bounded(packed), mode="r") as entries,
        ):
            for entry in entries:
                if fault := _fault(entry, seen, tops):
                    raise VitsweepError(f"{entry.name!r}: {fault}")
                entries.extract(entry, folder, set_attrs=False, filter="data")
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, VitsweepError) as error:
        text = f"`{archive}` is no bundle, is damaged, or was packed by something else than `vitsweep bundle`"
        raise VitsweepError(f"{text}. {error}. Nothing in it was used.") from error
    if not tops:
        raise VitsweepError(f"`{archive}` is empty.")
    guard(folder)
    return folder / tops.pop()


def _fault(entry: tarfile.TarInfo, seen: set[str], tops: set[str]) -> str:
    """Return why an entry is refused, or nothing; note it among those that were seen."""
    top, _, name = entry.name.partition("/")
    alike = entry.name.casefold()
    tops.add(top)
    same, seen_before = alike in seen, len(seen)
    seen.add(alike)
    rules = {
        "it is a link, a folder, a device or no plain file": not entry.isreg() or entry.issparse(),
        "it lies outside of the sweep's folder, or is no file of a bundle": not (
            NAME.fullmatch(top) and is_bundled(name)
        ),
        "the archive holds two sweeps": len(tops) > 1,
        "its name is given twice, or differs from another by case alone": same,
        f"it is larger than {MOST_BYTES} bytes": entry.size > MOST_BYTES,
        f"the archive holds more than {MOST_ENTRIES} files": seen_before >= MOST_ENTRIES,
    }
    return next((rule for rule, applies in rules.items() if applies), "")
