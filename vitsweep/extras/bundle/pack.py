"""A sweep written as a bundle: records, tables, claims, figures and code state in one archive."""

import getpass
import grp
import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import distributions, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from vitsweep.charts import style
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.extras.bundle.claims import DEFAULT_MARGIN, Claim, as_tree, claims_of
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
from vitsweep.foreign import MOST_JSON_BYTES, foreign, parsed_json
from vitsweep.report.figures import drawn
from vitsweep.report.views import collect
from vitsweep.results.pack import OF_CELL
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count
from vitsweep.tables.sweep_tables import SweepTables

SUMS = "SHA256SUMS"
MOST_ENTRIES, MOST_TOTAL_BYTES, MOST_AT_ONCE = 200_000, 2**33, 2**24
"""A larger archive is refused; so is a header that would be read into memory at once."""
MOST_SMALL_BYTES, MOST_RATIO = 2**28, 50
"""What is larger than this once it is extracted is at most so many times as large as the archive."""

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
    return "".join(f"{_sha256(folder / name)}  {name}\n" for name in names)


def _sha256(path: Path) -> str:
    with open(open_safely(path, os.O_RDONLY), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sums(lines: Iterable[str]) -> dict[str, str]:
    parts = (line.partition("  ") for line in lines)
    return {name: digest for digest, _, name in parts if name}


def checksum_faults(folder: Path) -> list[str]:
    """Return what a folder holds beside what its list of checksums says."""
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


# What is packed: records, tables, figures, code, claims.


# Hosts, users and paths taken out of the files of a bundle.

HIDDEN = "hidden"
SHORT = 4
"""A shorter word is hidden only where it stands alone: `vm` is part of many others."""
NOBODY = {"", *"root user users staff wheel ubuntu nobody localhost none null".split()}
"""Users, groups and hosts that identify nobody."""
GIT_USER = ("git", "config", "user.name")

_URL = re.compile(r"\b([a-z][a-z0-9+]*)://[^\s'\"<>)\]},\\]+")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+(?::[\w./~-]+)?")  # also host:path of git and scp
_ADDRESS = re.compile(r"(?<![\d.])(?!127\.0\.0\.1)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_ADDRESS_6 = re.compile(r"(?<![\w:])[\da-f]{0,4}(?::[\da-f]{0,4}){3,7}(?![\w:])", re.I)
_PATH = re.compile(r"(?<![\w/.<-])(?:~[\w.-]*/|/(?!(?:dev|proc|sys)/))(?:[\w.+@%-]+/)+[\w.+@%-]*")
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)|/root\b")
_ACCOUNT = re.compile(
    r"(\b(?:account|entity|mail[-_]user|hostname|MASTER_ADDR|LOGNAME|USER|[A-Z_]*(?:HOST|HOSTNAME|NODELIST|NODENAME)"
    r"|WANDB_(?:ENTITY|PROJECT))['\"]?[=:]\s*['\"]?)[^\s'\",\]}\[]+(?:\[[\d,-]+\])?"
)
_NODES = re.compile(r"\b[a-z][\w.-]*\[\d+-\d+(?:,\d+(?:-\d+)?)*\]", re.I)
"""What Slurm calls several nodes: `node[01-04,07]`."""
_TEAM = re.compile(
    r"(?:\bentity['\"]?[=:]\s*['\"]?|WANDB_ENTITY=|logged in as: )([\w-]+)(?: \(([\w-]+)\))?"
)
_DOMAIN = r"(?:\.[a-z][\w-]*){2,}"
_NUMBERED = re.compile(r"(.*[a-z-])\d+")
_KEPT_NAME = re.compile(r"[\w.-]+\.(?:py|pyc|so|log|json|yaml|diff|parquet|csv)")
_MARK = re.compile(r"^mark: '?[0-9a-f]+'?\n|, \"mark\": \"[0-9a-f]+\"", re.MULTILINE)


class Anonymizer:
    """Rewrites texts; equal words and paths get equal replacements.

    Args:
        hosts: names of machines.
        users: names of people and their accounts.
        words: what else is hidden.
        vocabulary: settings and their values. A host or user of the same name stays where it is no path.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        users: Iterable[str],
        words: Iterable[str],
        vocabulary: Iterable[str],
    ) -> None:
        known = {word.lower() for word in vocabulary}
        self.kept: list[str] = []
        self._words: dict[str, str] = {}
        self._series = set[str]()  # of hosts that differ in a number
        self._paths: dict[str, str] = {}
        kinds = {"host": sorted(hosts), "user": sorted(users), "name": sorted(words)}
        for kind, names in kinds.items():
            for number, name in enumerate(names, start=1):
                if name.lower() in NOBODY | self._words.keys():
                    continue
                if kind == "host" and (series := _NUMBERED.fullmatch(name.lower())):
                    self._series |= {series[1]} - {f"{each}-" for each in kinds}
                if name.lower() in known:
                    self.kept.append(name)
                else:
                    self._words[name.lower()] = f"{kind}-{number}"
        if both := sorted({w.lower() for w in words} & known):
            raise BadValueError(f"`--hide {both[0]}` is a setting, or the value of one: it stays.")
        self._known = known
        self.inside = {
            term: word
            for term in sorted(known)
            for word in self._words
            if len(word) >= SHORT and word in term and "." not in term
        }

    @property
    def summary(self) -> str:
        """What was rewritten, for the one who did not want to show it."""
        kinds = Counter(new.partition("-")[0] for new in self._words.values())
        found = [count(number, kind) for kind, number in kinds.items()]
        found.append(count(len(self._paths), "path"))
        return f"hidden: {', '.join(found)} ({', '.join(self._words)})"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        words = [f"({self._alone(word)})" for word in self._longest_first()]
        series = [rf"(?<![A-Za-z0-9]){re.escape(s)}\d+\b" for s in self._series if len(s) >= SHORT]
        return re.compile("|".join([*words, *series]) or r"(?!)", re.I)

    def _longest_first(self) -> list[str]:
        return sorted(self._words, key=len, reverse=True)

    def _alone(self, word: str) -> str:
        escaped = re.escape(word)
        if len(word) < SHORT or any(word in term for term in self._known):
            escaped = rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
        return escaped + rf"(?:{_DOMAIN})?" * self._words[word].startswith("host")

    def text(self, text: str) -> str:
        """Return a text without hosts, users, paths, addresses, and this user's marks."""
        text = _MARK.sub("", text)
        text = _URL.sub(rf"\1://{HIDDEN}", text)
        text = _EMAIL.sub(f"name@{HIDDEN}", text)
        text = _ADDRESS.sub("0.0.0.0", text)
        text = _ADDRESS_6.sub("::", text)
        text = _PATH.sub(lambda found: self._path(found[0]), text)
        text = _HOME.sub(f"/{HIDDEN}", text)
        text = _ACCOUNT.sub(rf"\1{HIDDEN}", text)
        text = _NODES.sub(HIDDEN, text)
        return self._pattern.sub(self._new_word, text)

    def _new_word(self, found: re.Match[str]) -> str:
        if found.lastindex is None:
            return "host"
        return self._words[self._longest_first()[found.lastindex - 1]]

    def _path(self, path: str) -> str:
        name = path.rpartition("/")[2]
        if not _KEPT_NAME.fullmatch(name):
            name = self._paths.setdefault(path, f"{len(self._paths) + 1}")
        return f"/{HIDDEN}/{name}"

    def require_none(self, folder: Path, names: Iterable[str]) -> None:
        """Refuse a folder in which a word is left, in any file, parquet decompressed.

        Raises:
            VitsweepError: one is; the file is named.
        """
        for name in names:
            if found := self._pattern.search(name) or self._pattern.search(_content(folder / name)):
                raise VitsweepError(f"`{name}` still holds `{found[0]}`: nothing was written.")


def _content(path: Path) -> str:
    if path.suffix != ".parquet":
        return read_bytes(path).decode("utf-8", "replace")
    table = pd.read_parquet(path)
    return f"{list(table.columns)} {table.attrs} {table.to_csv()}"


def anonymizer(store: Store, records: Iterable[RunRecord], words: Iterable[str]) -> Anonymizer:
    """Return what hides the hosts and users that a sweep names, and those of this process.

    Args:
        store: of the sweep.
        records: its runs.
        words: what is hidden besides.

    Raises:
        BadValueError: one of the words is a setting.
    """
    hosts, users, vocabulary = {socket.gethostname()}, {os.environ.get("USER", "")}, set[str]()
    with suppress(KeyError, OSError):  # no such user, as in some containers
        users.add(getpass.getuser())
    with suppress(KeyError, OSError):
        users.add(grp.getgrgid(os.getgid()).gr_name)
    with suppress(OSError):
        told = subprocess.run(GIT_USER, capture_output=True).stdout
        users.add(told.decode("utf-8", "replace").strip())
    for record in records:
        seen = (record.environment.get(key) for key in ("host", "node", "nodes_used"))
        hosts |= {part for value in seen if value for part in str(value).split(",")}
        vocabulary |= set(_terms(record.spec))
    for cell_id in store.cell_ids():
        lines = store.lines(cell_id, "attempts.jsonl")
        hosts |= {str(line["node"]) for line in lines if line.get("node")}
        with suppress(VitsweepError):
            users |= _people(str(store.frozen(cell_id)))
    for name in filter(is_bundled, files_of(store.root)):
        if name.endswith((".log", ".diff", ".jsonl")):
            users |= _people(read_bytes(store.root / name).decode("utf-8", "replace"))
    hosts |= {part for host in hosts if "." in host for part in (host.partition(".")[::2])}
    return Anonymizer(hosts, users, words, vocabulary)


def _people(text: str) -> set[str]:
    """Return the owners of home folders that a text names, and the accounts of trackers."""
    return {*_HOME.findall(text), *(name for found in _TEAM.findall(text) for name in found)}


def _terms(spec: Mapping[str, object]) -> Iterator[str]:
    for key, value in spec.items():
        yield from re.split(r"[._]", key)
        if isinstance(value, str) and "/" not in value:
            yield from {value, *re.split(r"[._]", value)}


FORMAT = 1
VIEWS = ("cells.csv", "replicates.csv")


@dataclass(frozen=True)
class Bundled:
    """What was written.

    Attributes:
        claims: of the bundle.
        notes: what was left out of it, or stays in it.
    """

    claims: list[Claim]
    notes: tuple[str, ...]


def write_bundle(
    store: Store,
    to: Path,
    *,
    drawn_by: str,
    margin: float = DEFAULT_MARGIN,
    anonymous: bool = False,
    hide: Sequence[str] = (),
) -> Bundled:
    """Write a sweep as one archive.

    Tables, figures and claims are made anew from the records. Weights, checkpoints, traces and jobs of a
    cluster stay behind.

    Args:
        store: of the sweep.
        to: the archive.
        drawn_by: hash of the code that draws and counts, see `check`.
        margin: of the claims.
        anonymous: rewrite hosts, users and paths.
        hide: further words to rewrite.

    Raises:
        VitsweepError: nothing was measured, or something cannot be hidden.
        OtherSchemaError: a record is of another schema.
    """
    records = list(store.runs())
    if not records:
        raise VitsweepError(f"Sweep `{store.name}` has no run: there is nothing to claim.")
    hidden = anonymizer(store, records, hide) if anonymous else None
    name = hidden.text(store.name) if hidden else store.name
    if not NAME.fullmatch(name):
        raise VitsweepError(f"A sweep called `{name}` cannot be bundled: rename its folder.")
    notes = [
        f"{count(n, 'damaged record')} of cell {c} left out"
        for c, n in store.damaged_runs().items()
    ]
    with TemporaryDirectory() as place:
        staged = Store(Path(place).resolve() / name).create()
        notes += _copy(store, staged.root, records, hidden)
        tables = collect(staged)
        claims = claims_of(tables.cells, margin)
        _derived(staged.root, tables, claims, drawn_by, hidden)
        for left in set(files_of(staged.root)):
            if not is_bundled(left):
                (staged.root / left).unlink()
        if hidden:
            hidden.require_none(staged.root, files_of(staged.root))
            notes.append(hidden.summary)
            notes += [
                f"`{word}` is also a setting, and stays outside of paths" for word in hidden.kept
            ]
            notes += [
                f"`{term}` is the value of a setting, and stays although it holds `{word}`"
                for term, word in hidden.inside.items()
            ]
        write_archive(staged.root, to)
    return Bundled(claims, tuple(notes))


def figures_of(tables: SweepTables) -> dict[str, str]:
    """Return file name -> SVG of every chart of a sweep's report."""
    return {f"figures/{chart.name}.svg": style.to_svg(figure) for chart, figure, _ in drawn(tables)}


def _derived(
    root: Path,
    tables: SweepTables,
    claims: list[Claim],
    drawn_by: str,
    hidden: Anonymizer | None,
) -> None:
    document = {
        "format": FORMAT,
        "anonymous": hidden is not None,
        "drawn_by": f"{drawn_by} matplotlib {version('matplotlib')}",
        "claims": as_tree(claims),
    }
    clean: Callable[[str], str] = hidden.text if hidden else str
    write_atomically(root / "claims.json", clean(json.dumps(document, indent=1)))
    write_atomically(root / "packages.txt", clean(packages()))
    for name, svg in figures_of(tables).items():
        write_atomically(root / name, svg)


def packages() -> str:
    """Return a line `name==version` for every package of this environment, in order."""
    found = {d.metadata["Name"].lower(): d.version for d in distributions() if d.metadata["Name"]}
    return "".join(f"{name}=={number}\n" for name, number in sorted(found.items()))


def _copy(
    store: Store, to: Path, records: Sequence[RunRecord], hidden: Anonymizer | None
) -> list[str]:
    """Copy the intact records of a sweep and what was written beside them; return what was left out."""
    left = []
    intact = {f"cells/{r.cell_id}/runs/{r.run_id}.json": r for r in records}
    moved: dict[str, str] = {}
    kept = (f"cells/{c}/{name}" for c in store.cell_ids() for name in OF_CELL if store.has(c, name))
    names = filter(is_bundled, {*files_of(store.root), *intact, *kept})
    own = [
        n for n in names if not (n in VIEWS or n.endswith(".parquet") or n.startswith("figures/"))
    ]
    # these get new names first
    for name in sorted(own, key=lambda n: (not n.endswith(".diff"), n)):
        if "/runs/" in name and name not in intact:
            continue
        try:
            content = _content_of(store, name, intact)
        except (UnsafeFileError, ValueError) as error:
            left.append(f"`{name}` left out ({error})")
            continue
        if hidden is None:
            write_atomically(to / name, content, durable=False)
            continue
        text = hidden.text(content.decode("utf-8", "replace"))
        for before, after in moved.items():
            text = text.replace(before, after)
        place = hidden.text(name)
        if name.endswith(".diff"):
            place = moved[name] = f"code/{sha256(text.encode()).hexdigest()[:12]}.diff"
        elif name in intact:
            text = RunRecord.from_tree(parsed_json(hidden.text(intact[name].to_json()))).to_json()
        write_atomically(to / place, text, durable=False)
    return left


def _content_of(store: Store, name: str, intact: Mapping[str, RunRecord]) -> bytes:
    """Return a file of a sweep folder, which may be in the pack."""
    if name in intact:
        return intact[name].to_json().encode()
    of_cell = name.split("/")[1:]
    if name.startswith("cells/") and len(of_cell) == 2:
        return store.content(*of_cell)
    return read_bytes(store.root / name)


def read_document(root: Path) -> dict[str, object]:
    """Return what `claims.json` of a bundle says.

    Raises:
        VitsweepError: it is missing, damaged or of another format.
    """
    try:
        tree = foreign(root / "claims.json")
    except (OSError, ValueError) as error:
        raise VitsweepError(f"`claims.json` of the bundle cannot be read ({error}).") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise VitsweepError(f"`claims.json` of the bundle is not of format {FORMAT}.")
    return tree
