"""No file imports itself by way of others: a circle hides which of its files comes first."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_layering import HOUSE, files, imports


def module_of(path: Path) -> str:
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(paths: list[Path]) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, inside functions too, but not for types alone."""
    known = {module_of(path): path for path in paths}
    return {
        name: {m for found in imports(path) for m in (found, found.rpartition(".")[0])}
        & set(known) - {name}
        for name, path in known.items()
    }


def first_circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_of_files() -> None:
    assert first_circle(imported_files(files())) == []


FRONT_DOORS = {"vitsweep", "vitsweep.extras"}
"""They name the types of what they offer."""


def test_no_circle_through_imports_for_types() -> None:
    """But those of `spec`, whose classes name one another."""
    paths = files()
    graph = imported_files(paths)
    for name in graph.keys() - FRONT_DOORS:
        path = next(path for path in paths if module_of(path) == name)
        tree = ast.walk(ast.parse(path.read_text()))
        named = {str(node.module) for node in tree if isinstance(node, ast.ImportFrom)}
        known = named & graph.keys()
        is_spec = name.startswith("vitsweep.spec.")
        graph[name] |= {m for m in known if not (is_spec and m.startswith("vitsweep.spec."))}
    assert first_circle(graph) == []


@pytest.mark.parametrize(
    "second", ["from vitsweep.a import x", "def f():\n    from vitsweep.a import x"]
)
def test_a_circle_is_found_at_load_time_and_inside_functions(
    second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_cycles.HOUSE", tmp_path)
    paths = [tmp_path / "vitsweep" / name for name in ("a.py", "b.py")]
    paths[0].parent.mkdir()
    paths[0].write_text("from vitsweep.b import y\n")
    paths[1].write_text(second)
    assert set(first_circle(imported_files(paths))) == {"vitsweep.a", "vitsweep.b"}
