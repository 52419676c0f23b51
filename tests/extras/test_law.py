"""The core knows no optional feature: it reads what each adds from the registry."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cells import TINY, composer, entry
from tests.command import NO_REPORT, QUICK
from tests.extras import PAGES, WORDS
from tests.test_layering import HOUSE, PACKAGE, files, name_of
from vitsweep import extras
from vitsweep.cli import VERBS, show
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError, VitsweepError

DOOR = PACKAGE / "extras"
NO_CORE_WORD = {word for words in WORDS.values() for word in words}
TESTS = HOUSE / "tests"


def core_files() -> list[Path]:
    return [path for path in files() if not path.is_relative_to(DOOR)]


def faults(text: str) -> list[str]:
    """What a core file must not hold: an import or a path of a feature, and identifiers of its own words."""
    return sorted(set(_faults(ast.parse(text))))


def _faults(tree: ast.AST) -> Iterator[str]:
    path = re.compile(rf"\bextras[./](?:{'|'.join(extras.KNOWN)})\b")
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=imported):
                names = [alias.asname or alias.name for alias in imported]
                yield from (a.name for a in imported if path.search(a.name))
            case ast.ImportFrom(module=module, names=imported):
                names = [alias.asname or alias.name for alias in imported]
                yield from (str(module) for _ in [0] if path.search(str(module)))
            case ast.Constant(value=str(value)):
                yield from path.findall(value)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names = [name]
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names = [name]
        yield from (name for name in names if is_word(name))


def is_word(name: str) -> bool:
    bare = name.lstrip("_")
    begins = tuple(word for word in NO_CORE_WORD if word.endswith("_"))
    return bare in NO_CORE_WORD or bare.startswith(begins)


def test_no_core_file_knows_a_feature() -> None:
    assert {
        name_of(path): found for path in core_files() if (found := faults(path.read_text()))
    } == {}


def test_the_law_finds() -> None:
    for text in [
        "from vitsweep.extras.judge.session import judge",
        "def f():\n    import vitsweep.extras.judge",
        "if TYPE_CHECKING:\n    from vitsweep.extras.judge import x",
        "place = 'vitsweep.extras.judge.session'",
        "file = ROOT / 'extras/judge/rank.py'",
        "def _judge_request(): ...",
        "for judge_request in x: ...",
        "self.judge_request = 1",
        "def f(judge_request): ...",
    ]:
        assert faults(text)
        assert (
            faults("from vitsweep.extras import NAMES, load\nwords = load(NAMES['measured'])") == []
        )


def test_tests_of_the_core_import_no_feature() -> None:
    own = [path for path in TESTS.rglob("*.py") if not path.is_relative_to(TESTS / "extras")]
    found = {
        name_of(path): words
        for path in own
        if (
            words := re.findall(
                r"^\s*(?:from|import) (?:vitsweep|tests)\.extras\.\w+", path.read_text(), re.M
            )
        )
    }
    assert found == {}


def test_every_folder_is_a_feature_and_has_what_it_is_declared_to_have() -> None:
    folders = {path.parent.name for path in DOOR.glob("*/__init__.py")}
    assert folders <= set(extras.KNOWN)
    assert set(extras.FEATURES) == {n for n in folders if {*extras.KNOWN[n].needs} <= folders}
    for name, feature in extras.FEATURES.items():
        assert all((HOUSE / "docs" / page).is_file() for page in PAGES.get(name, ()))
        assert {f"verb_{verb}" for verb in feature.verbs} == {
            path.stem for path in (DOOR / name).glob("verb_*.py")
        }
    assert all(extras.load(place) for place in extras.NAMES.values())
    assert set(extras.VERBS) <= set(VERBS)


def test_a_removed_folder_takes_its_feature_and_those_that_need_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras.KNOWN, "a", extras.Feature())
    monkeypatch.setitem(extras.KNOWN, "b", extras.Feature(needs=("a",)))
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__init__.py").touch()
    assert not extras.is_here("a")
    assert not extras.is_here("b"), "it needs `a`"
    (tmp_path / "a").mkdir()
    assert not extras.is_here("a"), "bytecode of a removed folder is left"
    (tmp_path / "a" / "__init__.py").touch()
    assert extras.is_here("b")


def test_the_front_door_and_a_sweep_on_this_machine_load_no_feature(tmp_path: Path) -> None:
    alone = [*QUICK, "resources.ranks_per_node=1", "sharding=none", "measurement.prove=none"]
    code = (
        "import sys, vitsweep, vitsweep.cli.main as main, vitsweep.cli.show as show\nshow.usage()\n"
        f"assert main.run({[*alone, NO_REPORT]}) == 0\n"
        "print([n for n in sys.modules if n.startswith('vitsweep.extras.')])"
    )
    environment = os.environ | {"VITSWEEP_PREDICT": "always"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr


def test_settings_and_options_of_a_removed_feature_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "ABSENT", {"only": None, "max_gpu_hours": None})
    monkeypatch.setattr(extras, "OPTIONS", {})
    sweep_settings(composer().compose([]).tree)
    with pytest.raises(BadValueError, match=r"`sweep\.max_gpu_hours`"):
        sweep_settings(composer().compose(["sweep.max_gpu_hours=3.125"]).tree)
    with pytest.raises(VitsweepError, match="`report --latex`"):
        extras.option("report --latex")
    shown = show.usage() + VERBS["report"].parser().format_help()
    assert "latex" not in shown.lower()


def test_a_setting_of_a_feature_that_is_absent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.KNOWN, "a", extras.Feature(instruments={"trace": "instrument"}))
    [reason] = entry(*TINY, "measurement.trace=true").reasons
    assert "`measurement.trace=True`" in reason
