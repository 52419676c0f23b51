"""Which source files can change the numbers of a cell, and a hash over them.

Two runs of a cell may be taken together only if this hash is the same. It covers

- the module that every rank runs (`execution.worker`),
- the modules of the classes that the cell's `_target_` keys name, and of the instruments it sets,
- and every module that these import, wherever in the file and however deep: own modules of a user too,
  in git or not. Installed packages are left out; torch's version is compared by itself.

Rooms that cannot change a number are left out as well (`LEFT_OUT`), with what only they import, and the
lists of what the package and its optional features offer. What is typed, planned, submitted and drawn is
imported by nothing that a rank runs. What composition decides is in the cell's id.
"""

import ast
import hashlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.extras import INSTRUMENTS
from vitsweep.spec.cell_spec import CellSpec

PACKAGE_FOLDER = Path(__file__).parents[1]
EVERY_RANK = f"{PACKAGE_FOLDER.name}.execution.worker"
LEFT_OUT = {"console", "errors", "files", "foreign", "rates", "results", "streams"}
"""Rooms of the package that a rank uses to write, to say and to compare, never to train or to time."""

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")


@dataclass(frozen=True)
class CellCode:
    """The code of a cell.

    Attributes:
        files: name of a source file -> hash of its content. A file of the package is named by its
            path from the folder above it, others by their module.
    """

    files: Mapping[str, str]

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits over all files."""
        text = "\n".join(f"{name} {digest}" for name, digest in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class Sources:
    """The source files as they are when they are first needed, for all cells of one command.

    A file that this process has read before is read again only if it has changed.
    """

    def __init__(self) -> None:
        self._of_module: dict[str, dict[str, str]] = {}
        self._of_modules: dict[frozenset[str], CellCode] = {}

    def of(self, cell: CellSpec) -> CellCode:
        """Return the code of a cell."""
        classes = (cls.__module__ for cls in _classes(cell))
        own = (*cell.model.code_modules, *cell.data.code_modules)
        set_ = [at for key, at in INSTRUMENTS.items() if getattr(cell.measurement, key)]
        modules = frozenset([EVERY_RANK, *classes, *own, *(f"vitsweep.extras.{at}" for at in set_)])
        if modules not in self._of_modules:
            files = (file for module in modules for file in self._reached(module).items())
            self._of_modules[modules] = CellCode(dict(files))
        return self._of_modules[modules]

    def _reached(self, module: str) -> dict[str, str]:
        if module not in self._of_module:
            found = ((name, path, _version(path)) for name, path in _reached(module).items())
            self._of_module[module] = _digests(found)
        return self._of_module[module]


def package_hash(folder: str = "") -> str:
    """Return twelve hex digits over all source files of the package, or of one of its folders."""
    return CellCode(_digests(_versions(PACKAGE_FOLDER / folder))).hash


MOST_FILES = 4
"""More changed files than this are not named in a message."""


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of files that differ between two states of the code of a cell."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _classes(spec: Any) -> Iterator[type]:
    """Yield the class of a spec and of the parts that it is made of."""
    yield type(spec)
    for field in fields(spec):
        if is_dataclass(part := getattr(spec, field.name)):
            yield from _classes(part)


_Version = tuple[int, int, int]


def _version(path: str) -> _Version:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _versions(path: Path) -> Iterator[tuple[str, str, _Version]]:
    """Yield name, path and version of the source files at or below a path of the package."""
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        yield str(file.relative_to(PACKAGE_FOLDER.parent)), str(file), _version(str(file))


def _digests(files: Iterable[tuple[str, str, _Version]]) -> dict[str, str]:
    return {name: _digest(path, version) for name, path, version in files}


@lru_cache(maxsize=4096)
def _digest(path: str, version: _Version) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def _reached(module: str) -> dict[str, str]:
    """Return name -> path of a module and of all that it imports."""
    found: dict[str, str] = {}
    waiting, seen = [module], {module}
    root = module.partition(".")[0]
    while waiting:
        name = waiting.pop()
        path = _path_of(name)
        if path is None or not _belongs(name, path, root):
            continue
        inside = Path(path).is_relative_to(PACKAGE_FOLDER)
        found[str(Path(path).relative_to(PACKAGE_FOLDER.parent)) if inside else name] = path
        new = set(_imported(path, _version(path), name)) - seen
        seen |= new
        waiting += new
    return found


def _belongs(name: str, path: str, root: str) -> bool:
    """Tell whether a module can change the numbers of a cell."""
    top, _, below = name.partition(".")
    if top == PACKAGE_FOLDER.name:
        return below not in ("", "extras") and below.partition(".")[0] not in LEFT_OUT
    return top == root or not _INSTALLED.search(path)


@lru_cache(maxsize=4096)
def _path_of(name: str) -> str | None:
    """Return the file of a module without importing it; None where it has none."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return None
    if (loaded := sys.modules.get(name)) is not None:
        return getattr(loaded, "__file__", None)
    folders: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:depth]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return spec.origin if spec and spec.has_location else None


@lru_cache(maxsize=4096)
def _imported(path: str, version: _Version, module: str) -> tuple[str, ...]:
    """Return all names that a file may import as modules, those in functions included."""
    if not path.endswith(".py"):
        return ()
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    names: list[str] = []
    for node in _run(_parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
            names += [str(base), *(f"{base}.{alias.name}" for alias in node.names)]
    parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
    return tuple(sorted(parents | set(names)))


def _parsed(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"`{path}`, line {line}," if line else f"`{path}`"
        raise VitsweepError(
            f"{place} is no Python ({getattr(error, 'msg', error)}), and the code of a cell imports it: "
            "correct the file, and type the same command again."
        ) from error


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node that run: all but those for type checkers."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not for_types:
            yield child
            yield from _run(child)
