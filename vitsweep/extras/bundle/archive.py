"""A sweep as one archive: records, tables, claims, code state, checksums; read within bounds."""

import gzip
import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.extras.bundle.claims import Claim, as_document, claims_of
from vitsweep.files import (
    MOST_BYTES,
    NAME,
    UnsafeFileError,
    guard,
    open_safely,
    read_bytes,
    read_text,
    replacing,
    write_atomically,
)
from vitsweep.foreign import MOST_JSON_BYTES, foreign_table
from vitsweep.report.views import collect
from vitsweep.results.pack import OF_CELL
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count

SUMS = "SHA256SUMS"
MOST_ENTRIES, MOST_TOTAL_BYTES, MOST_AT_ONCE = 200_000, 2**33, 2**24
"""A larger archive is refused; so is a header that would be read into memory at once."""
MOST_SMALL_BYTES, MOST_RATIO = 2**28, 50
"""What is larger than this once it is extracted is at most so many times as large as the archive."""

_PLACES = (
    SUMS, "claims.json", "commands.jsonl", "race.json", "cells.csv",
    r"(cells|runs|samples|replicates)\.parquet", r"replicates\.csv",
    r"code/\w+\.(diff|json)",
    r"cells/[^/]+/(cell\.yaml|attempts\.jsonl|(record|prediction)\.json)",
    r"cells/[^/]+/runs/[^/]+\.json",
    r"cells/[^/]+/attempts/[^/]+/([^/]+\.log|failure-\d+\.json)",
)  # fmt: skip
_PLACE = re.compile("|".join(f"(?:{place})" for place in _PLACES))


def is_bundled(name: str) -> bool:
    """Whether a file of a sweep folder, named by its path in it, belongs into a bundle."""
    return _PLACE.fullmatch(name) is not None and all(map(NAME.fullmatch, name.split("/")))


def files_of(folder: Path) -> list[str]:
    """Return the sorted paths of all files below a folder, relative to it; links are not followed."""
    found = [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
    ]
    return sorted(found)


def checksums(folder: Path) -> str:
    """Return a line per file, as `sha256sum` writes and reads them."""
    names = [name for name in files_of(folder) if name != SUMS]
    return "".join(f"{_sha256(folder / name)}  {name}\n" for name in names)


def _sha256(path: Path) -> str:
    with open(open_safely(path, os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sums(lines: Iterable[str]) -> dict[str, str]:
    parts = (line.partition("  ") for line in lines)
    return {name: digest for digest, _, name in parts if name}


def checksum_faults(folder: Path) -> list[str]:
    """Return what a folder holds besides what its list of checksums says."""
    try:
        lines = read_text(folder / SUMS, MOST_JSON_BYTES).splitlines()
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

    def __init__(self, file: gzip.GzipFile, size: int) -> None:
        self._file = file
        self._most = min(max(MOST_SMALL_BYTES, MOST_RATIO * size), MOST_TOTAL_BYTES)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_AT_ONCE or self._file.tell() > self._most:
            raise ValueError("it is too large, or a header in it is")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def extract(archive: Path, folder: Path) -> Path:
    """Write the files of a bundle below a new, empty folder; return the sweep folder among them.

    Links, devices, pipes, sparse files, absolute and `..` paths, names that are given twice or differ by
    case alone, what is no file of a bundle, what is too large, and tables whose footers name more than a
    table has are refused, besides all that the `data` filter of tarfile refuses (PEP 706). Nothing that was
    extracted is ever imported or run.

    Raises:
        VitsweepError: the archive is no bundle or is damaged, or an entry or a table is refused.
        OSError: it cannot be read, or the folder not written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise VitsweepError(
            "`tarfile` of this Python has no filters: read bundles with Python 3.11.4 or newer."
        )
    seen: set[str] = set()
    tops: set[str] = set()
    try:
        with (
            gzip.GzipFile(archive) as packed,
            tarfile.TarFile(fileobj=_Bounded(packed, archive.stat().st_size), mode="r") as entries,
        ):
            for entry in entries:
                if fault := _fault(entry, seen, tops):
                    raise VitsweepError(f"{entry.name!r}: {fault}")
                entries.extract(entry, folder, set_attrs=False, filter="data")
    except (
        tarfile.TarError,
        gzip.BadGzipFile,
        EOFError,
        zlib.error,
        ValueError,
        VitsweepError,
    ) as error:
        text = f"`{archive}` is no bundle, is damaged, or was packed by something else than `vitsweep bundle`"
        raise VitsweepError(f"{text}. {error}. Nothing in it was used.") from error
    if not tops:
        raise VitsweepError(f"`{archive}` is empty: `vitsweep bundle` packs a sweep.")
    guard(folder)
    root = folder / tops.pop()
    for table in root.glob("*.parquet"):
        foreign_table(table, [])
    return root


def _fault(entry: tarfile.TarInfo, seen: set[str], tops: set[str]) -> str:
    """Return why an entry is refused, or nothing; note it among those that were seen."""
    top, _, name = entry.name.partition("/")
    alike = entry.name.casefold()
    tops.add(top)
    same, seen_before = alike in seen, len(seen)
    seen.add(alike)
    rules = {
        "it is not a regular file": not entry.isreg() or entry.issparse(),
        "it lies outside of the sweep's folder, or is no file of a bundle": not (
            NAME.fullmatch(top) and is_bundled(name)
        ),
        "the archive holds two sweeps": len(tops) > 1,
        "its name is given twice, or differs from another by case alone": same,
        f"it is larger than {MOST_BYTES} bytes": entry.size > MOST_BYTES,
        f"the archive holds more than {MOST_ENTRIES} files": seen_before >= MOST_ENTRIES,
    }
    return next((rule for rule, applies in rules.items() if applies), "")


VIEWS = ("cells.csv", "replicates.csv", "claims.json", SUMS)


def write_bundle(store: Store, to: Path) -> tuple[list[Claim], list[str]]:
    """Write a sweep as one archive.

    Tables and claims are made anew from the records. Weights, checkpoints, traces and jobs of a cluster
    stay behind.

    Args:
        store: of the sweep.
        to: the archive.

    Returns:
        The claims, and what was left out.

    Raises:
        VitsweepError: nothing was measured.
        OtherSchemaError: a record is of another schema.
    """
    records = list(store.runs())
    if not records:
        raise VitsweepError(f"Sweep `{store.name}` has no run: there is nothing to claim.")
    if not NAME.fullmatch(store.name):
        raise VitsweepError(f"A sweep called `{store.name}` cannot be bundled: rename its folder.")
    left = [
        f"{count(n, 'damaged record')} of cell {c} left out"
        for c, n in store.damaged_runs().items()
    ]
    with TemporaryDirectory() as place:
        staged = Store(Path(place).resolve() / store.name).create()
        left += _copy(store, staged.root, records)
        claims = claims_of(collect(staged).cells)
        write_atomically(staged.root / "claims.json", json.dumps(as_document(claims), indent=1))
        for name in files_of(staged.root):
            if not is_bundled(name):
                (staged.root / name).unlink()
        write_archive(staged.root, to)
    return claims, left


def _copy(store: Store, to: Path, records: Iterable[RunRecord]) -> list[str]:
    """Copy the intact records of a sweep and what was written next to them; return what was left out."""
    left = []
    intact = {f"cells/{r.cell_id}/runs/{r.run_id}.json": r for r in records}
    kept = (f"cells/{c}/{name}" for c in store.cell_ids() for name in OF_CELL if store.has(c, name))
    for name in sorted(filter(is_bundled, {*files_of(store.root), *intact, *kept})):
        is_view = name in VIEWS or name.endswith(".parquet")
        if is_view or ("/runs/" in name and name not in intact):
            continue
        try:
            write_atomically(to / name, _content_of(store, name, intact))
        except (UnsafeFileError, ValueError) as error:
            left.append(f"`{name}` left out ({error})")
    return left


def _content_of(store: Store, name: str, intact: Mapping[str, RunRecord]) -> bytes:
    """Return a file of a sweep folder, which may be in the pack."""
    if name in intact:
        return intact[name].to_json().encode()
    of_cell = name.split("/")[1:]
    if name.startswith("cells/") and len(of_cell) == 2:
        return store.content(*of_cell)
    return read_bytes(store.root / name)
