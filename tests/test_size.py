"""What `.ci/size` counts and refuses; the product's own figures are checked by `.ci/run`, not by tests."""

from pathlib import Path
from runpy import run_path

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "size"
if not FILE.is_file():
    pytest.skip("the source distribution has none", allow_module_level=True)
SIZE = run_path(str(FILE))


def test_code_is_counted_without_words_and_by_room(tmp_path: Path) -> None:
    for name, text in (
        ("a.py", '"""Said."""\n\n# said\nx = (\n    1\n)\n'),
        ("tables/b.py", 'def f():\n    """Said."""\n    return "held"\n'),
        ("report/templates/p.j2", "a\n\nb\n"),
        ("report/r.py", "a = 1\n"),
        ("objectives/c.py", "z = 1\n"),
        ("extras/__init__.py", "y = 1\n"),
        ("extras/judge/d.py", "y = 1\n" * 4),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = SIZE["rooms"](tmp_path)
    assert found == {
        "": 3, "tables": 2, "report": 1, "objectives": 1, "extras": 1, "extras/judge": 4,
    }  # fmt: skip
    assert SIZE["lines"](found) == {
        "code lines of the core": 6, "code lines of objectives/": 1, "code lines of all": 12,
        "code lines of a room": 4,
    }  # fmt: skip


def test_more_than_is_allowed_is_refused_and_as_much_is_not() -> None:
    allowed = {"keys": 3, "verbs": 2}
    assert SIZE["larger"]({"keys": 3, "verbs": 1}, allowed) == []
    [refused] = SIZE["larger"]({"keys": 4, "verbs": 2}, allowed)
    assert "keys: 4, and at most 3" in refused
