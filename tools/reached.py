"""Which test reaches which lines: what `tools.mutants` asks before it plants a bug.

    python -m tools.reached --out reached.jsonl      # about as long as the tests themselves

The tests run in a copy of the repository, in which the first statement of each block of a function of
`vitsweep/` tells that it was reached: in the process of the test, in ranks and in commands. A line of the
file is a test (or what the fixtures of a file do once for its tests) with its seconds, its outcome and
the blocks that it reached. A second call adds the files of tests that are new or changed; without it, a
changed file counts by the names of its functions.
"""

import argparse
import ast
import builtins
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG = ROOT / "reached.log"
"""In the copy: the blocks that were reached since the present test began, one a line."""
MAP = ROOT / ".pytest_cache" / "reached.jsonl"

QUIET = ("-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider")

_seen: set[str] = set()


def blocks(tree: ast.Module, path: str) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield each block of statements of each function with a name that outlives moved lines."""

    def within(node: ast.AST, name: str, count: list[int]) -> Iterator[tuple[str, list[ast.stmt]]]:
        for _, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            if name and children and isinstance(children[0], ast.stmt) and count:
                yield f"{path}:{name}#{count[0]}", children
                count[0] += 1
            for child in children:
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from within(child, f"{name}.{child.name}".lstrip("."), [0])
                elif isinstance(child, ast.ClassDef):
                    yield from within(child, f"{name}.{child.name}".lstrip("."), [])
                elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                    yield from within(child, name, count)

    return within(tree, "", [])


def block_of(source: str, path: str, line: int) -> str:
    """Return the innermost block of a line; "" outside functions."""
    found = {
        name: ((body[-1].end_lineno or 0) - body[0].lineno)
        for name, body in blocks(ast.parse(source), path)
        if body[0].lineno <= line <= (body[-1].end_lineno or 0)
    }
    return min(found, key=lambda name: found[name], default="")


def watch() -> None:
    """Let modules of `vitsweep/` that are imported from now on tell what is reached."""
    plain = SourceFileLoader.source_to_code
    inside = str(ROOT / "vitsweep") + os.sep

    def source_to_code(self: Any, data: Any, path: Any, **more: Any) -> Any:
        if not str(path).startswith(inside):
            return plain(self, data, path, **more)
        tree = ast.parse(data)
        for name, body in list(blocks(tree, str(Path(path).relative_to(ROOT)))):
            has_docstring = isinstance(body[0], ast.Expr) and isinstance(
                body[0].value, ast.Constant
            )
            tells = ast.parse(f"__reached__({name!r})").body[0]
            ast.copy_location(tells, body[0])
            for node in ast.walk(tells):
                ast.copy_location(node, body[0])
            body.insert(int(has_docstring), tells)
        return compile(tree, path, "exec", dont_inherit=True)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
    builtins.__reached__ = _tell  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_seen.clear)


def _tell(name: str, seen: set[str] = _seen, log: str = str(LOG)) -> None:
    if name not in seen:
        seen.add(name)
        try:
            file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{name}\n".encode())
            os.close(file)
        except OSError:
            pass


def pytest_configure(config: Any) -> None:
    """Let pytest write a line for each test and for the wide fixtures of each file."""
    import pytest  # not in every process that is watched

    out = Path(os.environ["REACHED"])

    class Plugin:
        outcomes: list[str]
        file: str

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
            LOG.write_text("")
            _seen.clear()
            self.outcomes, self.file, begun = [], item.nodeid.split("::")[0], time.monotonic()
            handled = yield
            ended = "failed" if "failed" in self.outcomes else self.outcomes[-1]
            skipped = "skipped" in self.outcomes
            self._keep(item.nodeid, time.monotonic() - begun, "skipped" if skipped else ended)
            return handled

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
            if fixturedef.scope == "function":
                return (yield)
            begun = LOG.stat().st_size if LOG.exists() else 0
            _seen.clear()
            made = yield
            self._keep(self.file, 0.0, "fixture", begun)
            _seen.clear()
            return made

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.outcomes.append(report.outcome)

        def _keep(self, test: str, seconds: float, outcome: str, begun: int = 0) -> None:
            with LOG.open("rb") as log:
                log.seek(begun)
                reached = sorted(set(log.read().decode(errors="replace").split("\n")[:-1]))
            kept = {"test": test, "file": digest(ROOT, self.file), "seconds": round(seconds, 2)}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept | {"outcome": outcome, "reached": reached}) + "\n")

    config.pluginmanager.register(Plugin())


def digest(root: Path, file: str) -> str:
    """Return what tells one state of a file from another."""
    return hashlib.sha1((root / file).read_bytes(), usedforsecurity=False).hexdigest()[:12]


def read(path: Path, root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the lines of tests that are there; of files that changed, by the names of their functions."""
    rows, found = _rows(path), []
    files = {row["test"].split("::")[0] for row in rows}
    texts = {file: (root / file).read_text() for file in files if (root / file).exists()}
    known = {file: digest(root, file) for file in texts}
    for row in rows:
        file, _, test = row["test"].partition("::")
        name = test.rpartition("::")[2].partition("[")[0]
        if file in texts and row["file"] != known[file] and test:
            row["test"] = f"{file}::{name}"
        if file in texts and (not test or f"def {name}(" in texts[file]):
            found.append(row)
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Run the tests that the map lacks, and write it."""
    from tools.mutants import copied

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=MAP)
    parser.add_argument("-m", dest="marks", default="not slow and not full")
    parser.add_argument("files", nargs="*", default=[])
    typed = parser.parse_args()
    typed.out.parent.mkdir(exist_ok=True)
    rows = _rows(typed.out)
    known = {(row["test"].split("::")[0], row["file"]) for row in rows}
    there = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    todo = typed.files or [
        file for file in sorted(there) if (file, digest(ROOT, file)) not in known
    ]
    kept = [row for row in rows if row["test"].split("::")[0] not in todo]
    typed.out.write_text("".join(json.dumps(row) + "\n" for row in kept))
    with tempfile.TemporaryDirectory(prefix="reached-") as folder:
        copy = copied(Path(folder))
        (copy / "sitecustomize.py").write_text("from tools.reached import watch\n\nwatch()\n")
        command = [sys.executable, "-m", "pytest", "-p", "tools.reached", *QUIET, "--tb=line"]
        told = {"PYTHONPATH": str(copy), "REACHED": str(typed.out.absolute())}
        subprocess.run(
            [*command, "-o", "timeout=120", "-m", typed.marks, *todo],
            cwd=copy,
            env=os.environ | told,
            check=False,
        )


if __name__ == "__main__":
    main()
