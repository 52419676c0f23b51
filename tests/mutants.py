"""Plant one bug at a time in a copy of the repository, and see whether the tests of its room find it.

    python -m tests.mutants --seed 1 --count 40 --out mutants.jsonl
    python -m tests.mutants --only vitsweep/tables/effects.py:200 --out mutants.jsonl

Rooms are the folders of `vitsweep/`. A bug is a negated comparison, another arithmetic operator, a
constant that is 1 larger, swapped branches, ...: the seed decides which. It is looked for by the
tests that import the mutated module, and by those of its room, `slow` ones excepted unless `--slow`.
Constants of a module are settings, and messages are words: neither is mutated.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "numpy",
    "pandas",
    "scipy.special",
    "torch",
    "hydra",
    "rich",
    "pydantic",
    "matplotlib.figure",
)
"""Imported once; each mutant is tested in a fork."""
MAX_TEST_FILES, SECONDS = 5, 300

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", ">="), ast.GtE: (">=", "<"), ast.Gt: (">", "<="), ast.LtE: ("<=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "True": "False", "False": "True"}
TEXTS = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert, ast.ClassDef)
"""Nodes of which nothing is mutated but, of classes, the bodies."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug: `source[start:end]` of the file becomes `new`."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def planted(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]


def mutants_of(path: Path) -> list[Mutant]:
    """Return every bug that can be planted in a file."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line.decode()))
    place = str(path.relative_to(ROOT))

    def offset(line: int, column: int) -> int:
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[Mutant]:
        begin, end = span(left)[1], span(right)[0]
        old, new = OPERATORS.get(type(operator), ("", ""))
        found = re.search(rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>=*/])", source[begin:end])
        if old and found:
            begin += found.start()
            yield Mutant(place, source.count("\n", 0, begin) + 1, begin, begin + len(old), old, new)

    def other(node: ast.AST, new: str) -> Mutant:
        begin, end = span(node)
        return Mutant(place, node.lineno, begin, end, source[begin:end], new)  # type: ignore[attr-defined]

    def of(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator)
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=int(power)) as right):
                yield other(right, str(power + 1))
            case ast.BinOp(left=left, op=operator, right=right):
                yield from between(left, right, operator)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, operator)
            case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
                begin, end = span(operand)
                yield other(node, source[begin:end])
            case ast.IfExp(body=body, orelse=orelse, test=test):
                (a, b), (c, d), (e, f) = span(body), span(test), span(orelse)
                yield other(node, f"({source[e:f]}) if {source[c:d]} else ({source[a:b]})")
            case ast.Constant(value=bool(value)):
                yield other(node, str(not value))
            case ast.Constant(value=int(number)):
                yield other(node, str(number + 1))
            case ast.Constant(value=float(number)):
                yield other(node, f"{number * 2 or 0.5!r}")
            case ast.Call(func=ast.Name(id=name) as called) if name in NAMES:
                yield other(called, NAMES[name])

    def walk(node: ast.AST) -> Iterator[Mutant]:
        yield from of(node)
        skipped = ("annotation", "returns", "decorator_list", "bases", "keywords", "type_params")
        for name, value in ast.iter_fields(node):
            if name in skipped and not (name == "keywords" and isinstance(node, ast.Call)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and (
                    isinstance(child, ast.ClassDef) or not isinstance(child, TEXTS)
                ):
                    yield from walk(child)

    tree = ast.parse(source)
    settings = [n for n in tree.body if isinstance(n, (ast.Assign, ast.AnnAssign))]
    tree.body = [n for n in tree.body if n not in settings]
    return list(walk(tree))


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draw bugs: each room in turn, a module of it by its number of bugs, and one of those."""
    draw, rooms = random.Random(seed), dict[str, list[Mutant]]()
    for path in sorted((ROOT / "vitsweep").rglob("*.py")):
        below = path.relative_to(ROOT / "vitsweep").parts
        rooms.setdefault(below[0] if len(below) > 1 else ".", []).extend(mutants_of(path))
    names = sorted(name for name, found in rooms.items() if found)
    largest = sorted(names, key=lambda name: -len(rooms[name]))
    turns = [*names, *(largest[i % len(largest)] for i in range(max(0, count - len(names))))]
    return [rooms[name].pop(draw.randrange(len(rooms[name]))) for name in turns[:count]]


def tests_for(path: str) -> list[str]:
    """Return the files of tests that may find a bug: those of the module first, then its room's."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    room = ROOT / "tests" / Path(*Path(path).parts[1:-1])
    names = rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b"
    importing, beside = [], []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.stem == f"test_{name}":
            importing.insert(0, file)
        elif re.search(names, file.read_text(encoding="utf-8")):
            importing.append(file)
        elif room != ROOT / "tests" and file.is_relative_to(room):
            beside.append(file)
    importing.sort(key=lambda file: (file.stem != f"test_{name}", not file.is_relative_to(room)))
    return [str(file.relative_to(ROOT)) for file in [*importing, *beside]][:MAX_TEST_FILES]


def copied(folder: Path) -> Path:
    """Copy what git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def verdict(mutant: Mutant, files: list[str], copy: Path, marks: str) -> str:
    """Return "caught", "survived", "timed out" or "error" for the tests in the copy, with the bug planted."""
    file = copy / mutant.path
    source = file.read_text(encoding="utf-8")
    file.write_text(mutant.planted(source), encoding="utf-8")
    try:
        process = os.fork()
        if process == 0:
            try:
                _test(files, copy, marks)
            except BaseException:
                traceback.print_exc()
            finally:  # never into the caller's clean-up
                os._exit(0)
        deadline = time.monotonic() + SECONDS
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(process, 9)
                os.waitpid(process, 0)
                return "timed out"
            time.sleep(0.1)
        return (copy / "verdict").read_text() if (copy / "verdict").exists() else "error"
    finally:
        (copy / "verdict").unlink(missing_ok=True)
        file.write_text(source, encoding="utf-8")


def _test(files: list[str], copy: Path, marks: str) -> None:
    """Become the tests of the copy."""
    os.setsid()
    os.chdir(copy)
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "vitsweep")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with (copy / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import pytest

    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    code = pytest.main(["-q", "-x", *quiet, "-p", "no:cacheprovider", "-m", marks, *files])
    verdicts = {0: "survived", 1: "caught", 2: "caught", 5: "survived"}  # 2: found by an import
    (copy / "verdict").write_text(verdicts.get(int(code), "error"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones of the seed")
    parser.add_argument("--only", nargs="*", default=[], metavar="FILE:LINE[:NEW]")
    parser.add_argument("--slow", action="store_true", help="with the slow tests of the rooms")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--list", action="store_true", help="name the bugs and their tests alone")
    typed = parser.parse_args()
    chosen = [] if typed.only else drawn(typed.seed, typed.count)[typed.skip :]
    for text in typed.only:
        path, line, *new = text.split(":", 2)
        here = [m for m in mutants_of(ROOT / path) if m.line == int(line)]
        chosen += [m for m in here if not new or m.new == new[0]]
    for name in () if typed.list else PRELOADED:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) if typed.list else copied(Path(folder))
        for mutant in chosen:
            files, begun = tests_for(mutant.path), time.monotonic()
            marks = "not full" if typed.slow else "not slow and not full"
            found = "" if typed.list else verdict(mutant, files, copy, marks)
            words = f"{mutant.path}:{mutant.line}  {mutant.old!r} -> {mutant.new!r}"
            print(f"{found:9} {words}  ({time.monotonic() - begun:.0f} s)", flush=True)
            if typed.list:
                print("         ", *files)
                continue
            tail = (copy / "log").read_text(errors="replace").splitlines()[-3:]
            kept = asdict(mutant) | {"verdict": found, "files": files, "tail": tail}
            with typed.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
