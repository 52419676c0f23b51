"""A cell's code hash changes with every file that can change its numbers, and with no other."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.errors import VitsweepError
from vitsweep.execution import code_hash
from vitsweep.execution.code_hash import CellCode, Sources, changed_files
from vitsweep.planning.freeze import plan_of
from vitsweep.spec.cell_spec import CellSpec

TECHNIQUE = """
from dataclasses import dataclass
from vitsweep.spec.technique import Memory

@dataclass(frozen=True)
class Mine(Memory):
    name: str = "mine"

    def apply(self, model):
        from {helper} import scaled
        return scaled(model)
"""


def code_of(cell: CellSpec) -> CellCode:
    return Sources().of(cell)


def spec_of(*overrides: str) -> CellSpec:
    plan = plan_of(expand([*TINY, *overrides], composer()), LAPTOP, composer())
    return next(iter(plan.entries.values())).spec


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CellSpec, Path]:
    """A cell with a technique of a user's own package, outside of git, and the package's folder."""
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "technique.py").write_text(TECHNIQUE.format(helper="lab.helper"))
    (folder / "helper.py").write_text("scaled = lambda model: model\n")
    (folder / "notes.py").write_text("unrelated = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "lab"]:
        monkeypatch.delitem(sys.modules, name)
    code_hash._path_of.cache_clear()
    from lab.technique import Mine  # type: ignore[import-not-found]

    return replace(spec_of(), memory=Mine()), folder


@pytest.mark.parametrize("edited", ["technique.py", "helper.py", "__init__.py"])
def test_a_users_module_and_what_it_imports_inside_functions_are_code_of_the_cell(
    own: tuple[CellSpec, Path], edited: str
) -> None:
    cell, folder = own
    before = code_of(cell)
    path = folder / edited
    path.write_text(path.read_text() + "# edited\n")
    after = code_of(cell)
    assert after.hash != before.hash
    module = "lab" if edited == "__init__.py" else f"lab.{edited.removesuffix('.py')}"
    assert changed_files(before.files, after.files) == [module]


def test_a_module_that_the_technique_does_not_import_changes_nothing(
    own: tuple[CellSpec, Path],
) -> None:
    cell, folder = own
    before = code_of(cell).hash
    (folder / "notes.py").write_text("unrelated = 2\n")
    assert code_of(cell).hash == before


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\ndef f(:\n", r"helper\.py`, line 2, is no Python"),
        ("\0", r"helper\.py`.* is no Python"),
    ],
)
def test_a_file_that_is_no_python_is_named_with_its_line(
    own: tuple[CellSpec, Path], code: str, words: str
) -> None:
    cell, folder = own
    (folder / "helper.py").write_text(code)
    with pytest.raises(VitsweepError, match=words):
        code_of(cell)


def test_a_technique_is_code_of_the_cells_that_choose_it_alone() -> None:
    plain, fsdp = (code_of(spec_of(f"sharding={s}")).files for s in ("ddp", "fsdp"))
    assert "vitsweep/techniques/sharding/fsdp.py" in fsdp.keys() - plain.keys()
    assert "vitsweep/training/trainer.py" in fsdp.keys() & plain.keys()
    assert not any("site-packages" in name or name.startswith("torch") for name in fsdp)


def test_the_content_decides_not_the_time_of_the_file(own: tuple[CellSpec, Path]) -> None:
    cell, folder = own
    before, helper = code_of(cell).hash, folder / "helper.py"
    text = helper.read_text()
    helper.write_text("scaled = print\n")
    assert code_of(cell).hash != before
    helper.write_text(text)
    assert code_of(cell).hash == before


ROOMS = {"cell.py", "collectives", "data", "equivalence.py", "execution", "measure", "model"} | {
    "parallelize.py",
    "spec",
    "techniques",
    "training",
    "world.py",
}


def test_what_is_typed_planned_drawn_and_written_is_code_of_no_cell() -> None:
    files = code_of(spec_of("task=train", "task.epochs=1", "data=digits")).files
    assert {Path(name).parts[1] for name in files} == ROOMS


def test_what_every_rank_runs_is_code_of_every_cell_wherever_it_is_imported() -> None:
    files = code_of(spec_of()).files
    for inside_a_function in ("cell.py", "training/checkpoint_manager.py"):
        assert f"vitsweep/{inside_a_function}" in files
    for not_run in ("spec/resolve.py", "execution/runner.py", "data/image_folder.py"):
        assert f"vitsweep/{not_run}" not in files


def test_an_import_for_types_alone_is_no_code_of_the_cell(own: tuple[CellSpec, Path]) -> None:
    cell, folder = own
    before = code_of(cell)
    path = folder / "technique.py"
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lab import notes\n"
    path.write_text(for_types + path.read_text())
    assert code_of(cell).files.keys() == before.files.keys()
