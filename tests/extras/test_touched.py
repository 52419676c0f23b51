"""Which optional features `.ci/run` tests whole, and that `make test` has a test of each."""

from collections.abc import Iterable
from pathlib import Path
from runpy import run_path

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "extras"
if not FILE.is_file():
    pytest.skip("the source distribution has none", allow_module_level=True)
RUN = run_path(str(FILE))
HERE = Path(__file__).parent
FILES = {
    "vitsweep/extras/__init__.py": "",
    "vitsweep/extras/one/__init__.py": "",
    "vitsweep/extras/one/part.py": "def f():\n    from vitsweep.tables import stats\n",
    "vitsweep/extras/two/__init__.py": "import vitsweep.extras.one.part\n",
    "vitsweep/tables/__init__.py": "",
    "vitsweep/tables/stats.py": "from vitsweep.errors import x\n",
    "vitsweep/errors.py": "",
    "tests/command.py": "",
    "tests/extras/two/test_two.py": "from tests.command import Command\n",
}
BOTH = {"one", "two"}


def test_a_feature_is_touched_by_its_folder_a_hook_and_what_it_imports(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def touched(changed: Iterable[str] | None) -> set[str]:
        found = RUN["touched"](None if changed is None else {*changed}, tmp_path)
        return {folder.removeprefix("tests/extras/") for folder in found}

    for changed, features in {
        "vitsweep/extras/one/part.py": BOTH,
        "vitsweep/extras/one/gone.py": {"one"},
        "vitsweep/extras/two/__init__.py": {"two"},
        "vitsweep/tables/stats.py": {"one"},
        "vitsweep/extras/__init__.py": BOTH,
        "tests/command.py": {"two"},
        "tests/extras/two/test_two.py": {"two"},
        "vitsweep/errors.py": set(),
        "docs/race.md": set(),
        "constraints.txt": BOTH,
    }.items():
        assert touched([changed]) == features, changed
    assert touched([]) == set()
    assert touched(None) == BOTH, "there is no commit to compare with"


def test_without_a_commit_to_compare_with_it_is_not_known_what_changed() -> None:
    assert RUN["changes"]("nosuch") is None


def test_each_feature_has_one_smoke_test() -> None:
    for folder in HERE.glob("*/__init__.py"):
        texts = [path.read_text() for path in folder.parent.glob("test_*.py")]
        assert sum(text.count("@pytest.mark.smoke\n") for text in texts) == 1, folder.parent.name
