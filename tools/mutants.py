"""Plant one bug at a time in a copy of the repository, and see whether a test finds it.

    python -m tools.reached                                    # once: which test reaches what
    python -m tools.mutants --seed 1 --count 40 --out mutants.jsonl
    python -m tools.mutants --rooms proof objectives --out mutants.jsonl
    python -m tools.mutants --only vitsweep/tables/effects.py:200 --out mutants.jsonl

A bug is a negated comparison, another arithmetic operator, a constant that is 1 larger (from 10 on twice
as large), swapped branches, ...: the seed decides which. It is looked for by the tests that reach its block,
those of its module and room first, then by the others of their files: `--seconds` of them, `slow` ones
excepted unless `--slow`. A test that does not end is a bug found, as in `make test`. A second call with the
same `--out` goes on, and looks again for what survived other tests.

Not drawn, since no result depends on them: messages (raised, printed, formatted, plurals), settings of a
module, imports, assertions, `strict` of zip, pauses and time limits, how charts look (keywords of their
drawing, also those that a dictionary holds, and the inches of a figure), and what runs with CUDA alone (the
branch of an `if`, or a function, that names it).
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
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.reached import MAP, QUIET, block_of, read

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
SECONDS_OF_TEST, SECONDS = 120, 300

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
SILENT = {"print", "sleep", "wait", "poll", "select", "warn", "warning", "info", "debug"}
"""Calls whose arguments are words or pauses."""
HINTS = {"strict", "timeout", "pin_memory", "non_blocking", "prefetch_factor", "persistent_workers",
         "maxsize", "stacklevel", "flush", "indent"}  # fmt: skip
"""Keywords without which the results are the same."""
INCHES = {"new_figure", "empty_figure"}
"""Functions of the charts whose arguments are the size of a figure."""
CUDA = re.compile(r"cuda|gpu|nvml", re.IGNORECASE)


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
        """Return the source with the bug in it."""
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
                yield other(node, str(number + 1 if number < 10 else 2 * number))
            case ast.Constant(value=float(number)):
                yield other(node, f"{number * 2 or 0.5!r}")
            case ast.Call(func=ast.Name(id=name) as called) if name in NAMES:
                yield other(called, NAMES[name])

    def is_silent(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SILENT:
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in INCHES:
                return True
            case ast.keyword(arg=name):
                return name in HINTS or "/charts/" in place
            case ast.IfExp(body=body, orelse=orelse):  # words, of which some may lack
                words = [n.value for n in (body, orelse) if isinstance(n, ast.Constant)]
                return any(isinstance(w, str) and (not w or " " in w) for w in words)
            case (
                ast.FunctionDef(name=name)
                | ast.Lambda(args=ast.arguments(args=[ast.arg(arg=name), *_]))
            ):
                return bool(CUDA.search(name))
        return isinstance(node, TEXTS) and not isinstance(node, ast.ClassDef)

    def runs_here(statements: list[ast.AST]) -> Iterator[ast.AST]:
        """Leave out what follows `if ... != "cuda": return`."""
        for node in statements:
            yield node
            if isinstance(node, ast.If) and CUDA.search(ast.unparse(node.test)):
                ends = isinstance(node.body[-1], (ast.Return, ast.Raise, ast.Continue))
                if ends and re.search(r"\bnot\b|!=", ast.unparse(node.test)):
                    return

    def walk(node: ast.AST) -> Iterator[Mutant]:
        yield from of(node)
        skipped = ["annotation", "returns", "decorator_list", "bases", "type_params"]
        skipped += ["keywords"] if isinstance(node, ast.ClassDef) else []
        match node:  # keywords of drawing
            case ast.Dict(keys=[ast.Constant(value=str()), *_]) if "/charts/" in place:
                skipped += ["values"]
        if isinstance(node, (ast.If, ast.IfExp)) and CUDA.search(words := ast.unparse(node.test)):
            skipped += ["test", "orelse" if re.search(r"\bnot\b|!=", words) else "body"]
        for name, value in ast.iter_fields(node):
            for child in runs_here(value if isinstance(value, list) else [value]):
                if name not in skipped and isinstance(child, ast.AST) and not is_silent(child):
                    yield from walk(child)

    tree = ast.parse(source)
    settings = [n for n in tree.body if isinstance(n, (ast.Assign, ast.AnnAssign))]
    tree.body = [n for n in tree.body if n not in settings]
    return list(walk(tree))


def drawn(seed: int, count: int, wanted: Collection[str]) -> list[Mutant]:
    """Draw bugs: each room (all where none is wanted) in turn, each of its bugs as likely as another."""
    draw, rooms = random.Random(seed), dict[str, list[Mutant]]()
    for path in sorted((ROOT / "vitsweep").rglob("*.py")):
        below = path.relative_to(ROOT / "vitsweep").parts
        rooms.setdefault(below[0] if len(below) > 1 else ".", []).extend(mutants_of(path))
    names = sorted(name for name, found in rooms.items() if found and name in (wanted or rooms))
    largest = sorted(names, key=lambda name: -len(rooms[name]))
    turns = [*names, *(largest[i % len(largest)] for i in range(max(0, count - len(names))))]
    return [rooms[name].pop(draw.randrange(len(rooms[name]))) for name in turns[:count]]


def tests_for(mutant: Mutant, rows: list[dict[str, Any]], at_most: float) -> tuple[list[str], int]:
    """Return the tests that may find a bug, the likely and quick ones first, and how many reach it."""
    blocks, after = _blocks(mutant)
    reaching = {row["test"] for row in rows if not blocks.isdisjoint(row["reached"])}
    likely = {row["test"] for row in rows if after in row["reached"]} & reaching
    files = {test.split("::")[0] for test in reaching}
    room, own = (
        str(Path("tests", *Path(mutant.path).parts[1:-1])),
        f"/test_{Path(mutant.path).stem}.py",
    )

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        test, file = row["test"], row["test"].split("::")[0]
        far = (not file.endswith(own)) + (not file.startswith(room))
        is_likely = test in likely and len(likely) < len(reaching) / 2
        return test not in reaching and file not in reaching, not is_likely, far, row["seconds"]

    chosen, seconds = [], 0.0
    for row in sorted(rows, key=order):
        if row["outcome"] == "passed" and row["test"].split("::")[0] in files:
            if seconds + row["seconds"] > at_most and (chosen or row["test"] not in reaching):
                continue
            seconds += row["seconds"]
            name, parameters, rest = row["test"].partition("[")
            chosen.append(name if "/" in rest else name + parameters + rest)  # of the copy's folder
    return list(dict.fromkeys(chosen)), len(reaching)


def _blocks(mutant: Mutant) -> tuple[set[str], str]:
    """Return the block of a bug (of a default its function's, of a field its readers) and the next one."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.lineno <= mutant.line < node.body[0].lineno:
            return {block_of(source, mutant.path, node.body[0].lineno)}, ""
    if block := block_of(source, mutant.path, mutant.line):
        below = (block_of(source, mutant.path, mutant.line + i) for i in range(1, 9))
        return {block}, next((name for name in below if name != block), "")
    field = re.match(r"\s+(\w+)\b", source.splitlines()[mutant.line - 1])
    reads = re.compile(rf"\.{field[1]}\b(?! = )" if field else r"(?!)")
    found = set()
    for path in (ROOT / "vitsweep").rglob("*.py"):
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        lines = [text.count("\n", 0, match.start()) + 1 for match in reads.finditer(text)]
        found |= {block_of(text, place, line) for line in lines}
    return found, ""


def copied(folder: Path) -> Path:
    """Copy what git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


def verdict(mutant: Mutant, tests: list[str], copy: Path, marks: str) -> str:
    """Return "caught", "survived", "timed out" or "error" for the tests in the copy, with the bug planted."""
    file = copy / mutant.path
    source, state = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(mutant.planted(source), encoding="utf-8")
    try:
        process = os.fork()
        if process == 0:
            try:
                _test(tests, copy, marks)
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
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # its bytecode is of this time


def _test(tests: list[str], copy: Path, marks: str) -> None:
    """Become the tests of the copy."""
    os.setsid()
    os.chdir(copy)
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "tools", "vitsweep")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(p for p in sys.path if p not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(copy)
    with (copy / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import pytest

    limit = f"timeout={SECONDS_OF_TEST}"
    code = pytest.main([*QUIET, "-x", "-o", limit, "-m", marks, *tests])
    text = (copy / "log").read_text(errors="replace")
    # 2: found by an import; 4: by one of conftest.py or of the file that was asked for
    verdicts = {0: "survived", 1: "caught", 2: "caught", 4: "caught", 5: "survived"}
    lost = code == 4 and "ERROR: not found" in text
    (copy / "verdict").write_text("error" if lost else verdicts.get(int(code), "error"))


def main() -> None:
    """Plant the bugs, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--rooms", nargs="*", default=[], help="draw from these alone")
    parser.add_argument("--only", nargs="*", default=[], metavar="FILE:LINE[:NEW]")
    parser.add_argument("--seconds", type=float, default=45, help="of tests for a bug")
    parser.add_argument("--slow", action="store_true", help="with the slow tests of the rooms")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--list", action="store_true", help="name the bugs and their tests alone")
    parser.add_argument(
        "--map", type=Path, default=MAP, help="written by `python -m tools.reached`"
    )
    typed = parser.parse_args()
    rows = read(typed.map)
    if not rows:
        sys.exit(f"{typed.map} has no tests of now: `python -m tools.reached --out {typed.map}`.")
    chosen = [] if typed.only else drawn(typed.seed, typed.count, typed.rooms)
    for text in typed.only:
        path, line, *new = text.split(":", 2)
        here = [m for m in mutants_of(ROOT / path) if m.line == int(line)]
        chosen += [m for m in here if not new or m.new == new[0]]
    for name in () if typed.list else PRELOADED:
        __import__(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) if typed.list else copied(Path(folder))
        lines = typed.out.read_text().splitlines() if typed.out.exists() else []
        judged = {json.dumps(kept["mutant"]): kept for kept in map(json.loads, lines)}
        for mutant in chosen:
            (tests, reaching), begun = tests_for(mutant, rows, typed.seconds), time.monotonic()
            before = judged.get(json.dumps(asdict(mutant)), {"verdict": "", "tests": []})
            if not typed.list and (before["verdict"] == "caught" or before["tests"] == tests != []):
                continue
            marks = "not full" if typed.slow else "not slow and not full"
            found = "" if typed.list else "survived"
            if tests and not typed.list:
                found = verdict(mutant, tests, copy, marks)
            words = f"{mutant.path}:{mutant.line}  {mutant.old!r} -> {mutant.new!r}"
            spent = f"{len(tests)} tests, {reaching} reach it, {time.monotonic() - begun:.0f} s"
            print(f"{found:9} {words}  ({spent})", flush=True)
            if typed.list:
                print("         ", *tests)
                continue
            tail = (copy / "log").read_text(errors="replace").splitlines()[-3:] if tests else []
            kept = {"mutant": asdict(mutant), "verdict": found, "reaching": reaching}
            judged[json.dumps(asdict(mutant))] = kept = kept | {"tests": tests, "tail": tail}
            with typed.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(kept) + "\n")
    if not typed.list:
        print(dict(Counter(judged[json.dumps(asdict(m))]["verdict"] for m in chosen)))


if __name__ == "__main__":
    main()
