"""Hosts, users and paths taken out of the files of a bundle."""

import getpass
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pandas as pd

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.files import read_bytes, read_lines
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store

HIDDEN = "hidden"
SHORT = 4
"""A shorter word is hidden only where it stands alone: `vm` is part of many others."""
NOBODY = {"", "root", "user", "ubuntu", "nobody", "localhost", "none"}
"""Users and hosts that identify nobody."""

_URL = re.compile(r"\b([a-z][a-z0-9+]*)://[^\s'\"<>)\]},\\]+")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ADDRESS = re.compile(r"(?<![\d.])(?!127\.0\.0\.1)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_PATH = re.compile(r"(?<![\w/.<-])(?:~[\w.-]*/|/(?!(?:dev|proc|sys)/))(?:[\w.+@%-]+/)+[\w.+@%-]*")
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)|/root\b")
_ACCOUNT = re.compile(r"\b((?:account|entity|mail[-_]user)['\"]?[=:]\s*['\"]?)[^\s'\",\]}]+")
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
        self._paths: dict[str, str] = {}
        kinds = {"host": sorted(hosts), "user": sorted(users), "name": sorted(words)}
        for kind, names in kinds.items():
            for number, name in enumerate(names, start=1):
                if name.lower() in NOBODY | self._words.keys():
                    continue
                if name.lower() in known:
                    self.kept.append(name)
                else:
                    self._words[name.lower()] = f"{kind}-{number}"
        if both := sorted({w.lower() for w in words} & known):
            raise BadValueError(f"`--hide {both[0]}` is a setting, or the value of one: it stays.")
        self._known = known

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(self._alone, self._longest_first())) or r"(?!)", re.I)

    def _longest_first(self) -> list[str]:
        return sorted(self._words, key=len, reverse=True)

    def _alone(self, word: str) -> str:
        escaped = re.escape(word)
        if len(word) < SHORT or any(word in term for term in self._known):
            return rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
        return escaped

    def text(self, text: str) -> str:
        """Return a text without hosts, users, paths, addresses, and this user's marks."""
        text = _MARK.sub("", text)
        text = _URL.sub(rf"\1://{HIDDEN}", text)
        text = _EMAIL.sub(f"name@{HIDDEN}", text)
        text = _ADDRESS.sub("0.0.0.0", text)
        text = _PATH.sub(lambda found: self._path(found[0]), text)
        text = _HOME.sub(f"/{HIDDEN}", text)
        text = _ACCOUNT.sub(rf"\1{HIDDEN}", text)
        return self._pattern.sub(lambda found: self._words[found[0].lower()], text)

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
    for record in records:
        seen = (record.environment.get(key) for key in ("host", "node", "nodes_used"))
        hosts |= {part for value in seen if value for part in str(value).split(",")}
        vocabulary |= set(_terms(record.spec))
    for cell_id in store.cell_ids():
        lines = read_lines(store.cell(cell_id) / "attempts.jsonl")
        hosts |= {str(line["node"]) for line in lines if line.get("node")}
        with suppress(VitsweepError):
            users |= set(filter(None, _HOME.findall(str(store.frozen(cell_id)))))
    for command in store.commands():
        users |= set(filter(None, _HOME.findall(str(command))))
    hosts |= {part for host in hosts if "." in host for part in (host.partition(".")[::2])}
    return Anonymizer(hosts, users, words, vocabulary)


def _terms(spec: Mapping[str, object]) -> Iterator[str]:
    for key, value in spec.items():
        yield from re.split(r"[._]", key)
        if isinstance(value, str) and "/" not in value:
            yield from {value, *re.split(r"[._]", value)}
