"""What `.ci/size` refuses; the figures themselves are checked by `.ci/run`, not by tests."""

from pathlib import Path
from runpy import run_path

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "size"
if not FILE.is_file():
    pytest.skip("the source distribution has none", allow_module_level=True)
SIZE = run_path(str(FILE))
KEPT = {"tables": 100, "tables modules": 3}


def test_more_than_a_figure_is_refused_and_less_is_not() -> None:
    faults = SIZE["faults"]
    assert [*faults({"tables": 90, "tables modules": 3}, KEPT, KEPT, [])] == []
    assert "tables: 101, and at most 100" in next(faults({"tables": 101}, KEPT, KEPT, []))
    assert "new: 1, and at most 0" in next(faults({"new": 1}, KEPT, KEPT, []))


def test_a_figure_is_raised_by_what_commits_say() -> None:
    before = {"tables": 80, "tables modules": 2}
    said = ["Size: +15 tables: a column", "Size: +5 tables: another", "Size: +1 tables modules: it"]
    assert [*SIZE["faults"](KEPT, KEPT, before, said)] == []
    [fault] = SIZE["faults"](KEPT, KEPT, before, said[1:])
    assert "`Size: +20 tables: REASON`" in fault
    assert len([*SIZE["faults"](KEPT, KEPT, before, ["Size: +20 tables:", said[2]])]) == 1
    assert [*SIZE["faults"](KEPT, KEPT, {}, [])] == [], "the first figures need no reason"


def test_code_is_counted_without_words_and_by_room(tmp_path: Path) -> None:
    for name, text in (
        ("vitsweep/a.py", '"""Said."""\n\n# said\nx = (\n    1\n)\n'),
        ("vitsweep/tables/b.py", 'def f():\n    """Said."""\n    return "held"\n'),
        ("vitsweep/report/templates/p.j2", "a\n\nb\n"),
        ("vitsweep/extras/judge/__init__.py", "y = 1\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = SIZE["rooms"](tmp_path)
    assert found == {
        "vitsweep": 3, "vitsweep modules": 1, "tables": 2, "tables modules": 1, "report": 2,
        "report modules": 0, "extras/judge": 1, "extras/judge modules": 0,
    }  # fmt: skip
