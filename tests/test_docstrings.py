"""Names in docstrings and comments of the product resolve: a module, what it defines, a file."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import vitsweep
from tests.extras import ABSENT_NAMES
from tests.test_layering import CONF, HOUSE, PACKAGE, files, name_of

NAME = re.compile(r"`((?:vitsweep\.)?[a-z_]\w*(?:\.\w+)+)(?:\(\))?`")
FILE = re.compile(r"(?<![\w./<{*\]-])((?:[\w.]+/)*[a-z_]\w*\.py)\b")
NO_MODULES = {path.name for path in CONF.iterdir()} | {"hydra", "cell"}
"""First parts of settings that are typed, and of attributes of a cell."""
DATA = (".csv", ".json", ".jsonl", ".parquet", ".py", ".yaml")
OF_OTHERS = re.compile(r"(train|file|step|a|verb_NAME)\.py$|(apex|pycls|timm)/")
"""Files of other projects, and in examples of what is typed."""


def texts(path: Path) -> Iterator[str]:
    """Docstrings and comments of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def source_files() -> tuple[str, ...]:
    folders = ("vitsweep", "hydra_plugins", "tests", "analysis", "benchmarks", "docs")
    return tuple(f"/{p.relative_to(HOUSE)}" for f in folders for p in (HOUSE / f).rglob("*.py"))


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module defines, imports, or has as attributes of its classes."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
    return frozenset(found)


def resolves(name: str, path: Path) -> bool:
    """Whether a dotted name is found in the package, in the room of the file, or beside it."""
    parts = name.removeprefix("vitsweep.").split(".")
    if name.startswith("vitsweep.") and parts[0] in vitsweep.__all__:
        return True
    for folder in (PACKAGE, *path.parents[: len(path.relative_to(HOUSE).parts) - 1]):
        for split in range(len(parts), 0, -1):
            place, inner = folder.joinpath(*parts[:split]), parts[split:]
            module = place.with_suffix(".py") if not place.is_dir() else place / "__init__.py"
            if module.is_file() and (not inner or inner[0] in defined(module)):
                return True
    return False


def unresolved(path: Path) -> set[str]:
    """Names of modules and files that a text mentions and that are nowhere."""
    rooms = {p.stem for p in PACKAGE.iterdir()} | {p.stem for p in path.parent.glob("*.py")}
    found = set()
    for text in texts(path):
        for name in NAME.findall(text):
            first = name.removeprefix("vitsweep.").split(".")[0]
            is_ours = first in rooms - NO_MODULES or name.startswith("vitsweep.")
            is_absent = name in ABSENT_NAMES
            if is_ours and not is_absent and not name.endswith(DATA) and not resolves(name, path):
                found.add(name)
        for name in FILE.findall(text):
            known = any(file.endswith(f"/{name}") for file in source_files())
            if not known and not OF_OTHERS.match(name):
                found.add(name)
    return found


def test_names_in_docstrings_resolve() -> None:
    assert {name_of(p): names for p in files() if (names := unresolved(p))} == {}
