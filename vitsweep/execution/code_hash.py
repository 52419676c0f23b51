"""Which source files can change the numbers of a cell, and a hash over them.

Two runs of a cell may be taken together only if this hash is the same. It covers

- the module that every rank runs (`execution.worker`),
- the modules of the classes that the cell's `_target_` keys name,
- and every module that these import, wherever in the file and however deep: own modules of a user too,
  in git or not, in packages, in folders without `__init__.py`, and where an editable install finds them.

Left out are the standard library, what lies in a folder of `sys.path` that holds a `*.dist-info` (pip
installed it), and the packages that vitsweep requires (`REQUIRED`), wherever they lie: a class or
function that the cell names is its code all the same, with all of its package. torch's version is
compared by itself. An import that finds nothing is reported once.

Rooms that cannot change a number are left out as well (`LEFT_OUT`), with what only they import, and the
lists of what the package and its optional features offer. So are instruments, which run after the timed
steps: a traced run of a cell and another one count together. What is typed, planned, submitted and drawn is
imported by nothing that a rank runs. What composition decides is in the cell's id.
"""

import ast
import hashlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from vitsweep.errors import VitsweepError
from vitsweep.interpreters import find_here
from vitsweep.spec.cell_spec import CellSpec

PACKAGE_FOLDER = Path(__file__).parents[1]
EVERY_RANK = f"{PACKAGE_FOLDER.name}.execution.worker"
LEFT_OUT = {"console", "errors", "files", "foreign", "interpreters", "rates", "results", "words"}
"""Rooms of the package that a rank uses to write, to say and to compare, never to train or to time."""

REQUIRED = frozenset(
    "PIL annotated_types apex functorch hydra jinja2 matplotlib mpl_toolkits numpy omegaconf pandas psutil "
    "pyarrow pydantic pydantic_core pynvml rich safetensors scipy sklearn submitit timm torch "
    "torchao torchgen torchvision transformers triton typing_extensions wandb yaml".split()
)
"""Top modules of what vitsweep requires, of its extras, and of what these bring besides it."""


class MissingImportWarning(UserWarning):
    """An import of a user's file finds no module."""


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


Known = dict[str, dict[str, str]]
"""Module -> name and hash of the files that it reaches, for all cells of one command."""


def code_of(cell: CellSpec, known: Known | None = None) -> CellCode:
    """Return the code of a cell.

    Args:
        cell: the cell.
        known: source files as they were when they were first needed; grows. They are read where not given,
            each again only if it has changed since this process read it.
    """
    known = {} if known is None else known
    classes = (cls.__module__ for cls in _classes(cell))
    own = (*cell.model.code_modules, *cell.data.code_modules)
    for module in own:
        with suppress(ImportError):  # why it cannot run is said where it is imported
            find_here(module)
    modules = {EVERY_RANK, *classes, *own}
    for module in modules - known.keys():
        found = ((name, path, _version(path)) for name, path in _reached(module).items())
        known[module] = _digests(found)
    return CellCode({name: digest for m in sorted(modules) for name, digest in known[m].items()})


def package_hash(folder: str = "") -> str:
    """Return twelve hex digits over all source files of the package, or of one of its folders."""
    top, root = PACKAGE_FOLDER / folder, PACKAGE_FOLDER.parent
    files = sorted(top.rglob("*.py")) if top.is_dir() else [top]
    found = ((str(file.relative_to(root)), str(file), _version(str(file))) for file in files)
    return CellCode(_digests(found)).hash


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
        path = _path_of(name, root)
        if path is None:
            continue
        inside = path.startswith(f"{PACKAGE_FOLDER}{os.sep}")
        found[path[len(f"{PACKAGE_FOLDER.parent}{os.sep}") :] if inside else name] = path
        imports = _imported(path, _version(path), name)
        new = imports.names - seen
        seen |= new
        waiting += sorted(new)
        optional = {n for n in imports.needed if n.partition(".")[0] not in REQUIRED}
        for missing in () if inside else sorted(n for n in optional if _place_of(n) is None):
            _say_missing(path, missing)
    return found


@cache  # Python's own memory of what was reported ends with each `catch_warnings`
def _say_missing(path: str, missing: str) -> None:
    warnings.warn(
        f"`{path}` imports `{missing}`, which is not found: no edit of it makes a measurement "
        "stale. Put its folder on `PYTHONPATH`, or install it.",
        MissingImportWarning,
        stacklevel=2,
    )


def _path_of(name: str, root: str) -> str | None:
    """Return the file of a module that can change the numbers of a cell; None of others, and of folders."""
    top, _, below = name.partition(".")
    if top == PACKAGE_FOLDER.name:
        if below in ("", "extras") or below.partition(".")[0] in LEFT_OUT:
            return None
    elif top in REQUIRED and top != root:
        return None
    path = place.file if (place := _place_of(name)) else None
    if path is None or top in (root, PACKAGE_FOLDER.name):
        return path
    around = [f for f in map(os.path.abspath, sys.path) if Path(path).is_relative_to(f)]
    # the innermost folder of `sys.path` around a file decides whether pip put it there
    return None if around and _holds_packages(max(around, key=len)) else path


@lru_cache
def _holds_packages(folder: str) -> bool:
    return any(Path(folder).glob("*.dist-info"))


class _Place(NamedTuple):
    """Where a module lies: its file, None of a folder without `__init__.py`; folders of what is below it."""

    file: str | None
    folders: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def _place_of(name: str) -> _Place | None:
    """Find a module, without importing it or one above it; None where there is no file of it."""
    above, _, _ = name.rpartition(".")
    if name.partition(".")[0] in sys.stdlib_module_names:
        return _Place(None)
    if (loaded := sys.modules.get(name)) is not None:
        file, folders = getattr(loaded, "__file__", None), tuple(getattr(loaded, "__path__", ()))
    else:
        higher = _place_of(above) if above else _Place(None, tuple(sys.path))
        spec = _spec_of(name, higher.folders if higher else ())
        if spec is None:
            return None
        file = spec.origin if spec.has_location else None
        folders = tuple(spec.submodule_search_locations or ())
    return _Place(file, folders) if (os.path.isfile(file) if file else folders) else None


def _spec_of(name: str, folders: Iterable[str]) -> ModuleSpec | None:
    """Ask the finders of these folders, and then those of editable installs."""
    joined = ModuleSpec(name, None, is_package=True)
    parts: list[str] = []
    # importlib's `PathFinder` raises KeyError below a folder without `__init__.py`
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        if (spec := finder.find_spec(name) if finder else None) is None:
            continue
        if spec.loader is not None:
            return spec
        parts += spec.submodule_search_locations or ()
    for meta in sys.meta_path if not parts else ():
        find = getattr(meta, "find_spec", None) if meta is not PathFinder else None
        if find and (spec := find(name, None)) is not None:
            return spec
    joined.submodule_search_locations = parts
    return joined if parts else None


class _Imports(NamedTuple):
    """Names that a file may import as modules, and those of them that are modules, `try` aside."""

    names: frozenset[str]
    needed: frozenset[str]


@lru_cache(maxsize=4096)
def _imported(path: str, version: _Version, module: str) -> _Imports:
    """Return what a file imports, in functions too."""
    if not path.endswith(".py"):
        return _Imports(frozenset(), frozenset())
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    names: set[str] = set()
    needed: set[str] = set()
    for node, is_tried in _run(_parsed(path)):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
            modules = {str(base)}
            names |= {f"{base}.{alias.name}" for alias in node.names}
        else:
            continue
        names |= modules
        needed |= set() if is_tried else modules
    parents = {".".join(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
    return _Imports(frozenset(parents | names), frozenset(needed))


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


def _run(node: ast.AST, is_tried: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the statements below a node that run, all but those for type checkers; is one in a `try`?"""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not for_types:
            yield child, is_tried
            yield from _run(child, is_tried or isinstance(child, (ast.Try, ast.TryStar)))
