"""A cell's code hash changes with every file that can change its numbers, and with no other."""

import os
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from tests.cells import LAPTOP, TINY, composer
from tests.command import ROOT
from vitsweep.composition.grid import expand
from vitsweep.errors import VitsweepError
from vitsweep.execution import code_hash
from vitsweep.execution.code_hash import MissingImportWarning, changed_files, code_of
from vitsweep.planning.sweep_plan import plan_of
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


def spec_of(*overrides: str) -> CellSpec:
    plan = plan_of(expand([*TINY, *overrides], composer()), LAPTOP, composer())
    return next(iter(plan.entries.values())).spec


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CellSpec, Path]:
    """A cell with a technique of a user's own package, outside of git, and the package's folder."""
    folder = tmp_path / "lab"
    write(folder)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return cell_of("lab.technique"), folder


def write(folder: Path, package: str = "lab") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "technique.py").write_text(TECHNIQUE.format(helper=f"{package}.helper"))
    (folder / "helper.py").write_text("scaled = lambda model: model\n")
    (folder / "notes.py").write_text("unrelated = 1\n")


def cell_of(module: str) -> CellSpec:
    return replace(spec_of(), memory=import_module(module).Mine())


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "lab"]:
        del sys.modules[name]
    code_hash._place_of.cache_clear()
    code_hash._holds_packages.cache_clear()


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


ROOMS = {"cell.py", "collectives", "data", "execution", "measure", "model"} | {
    "control_group.py",
    "job_environment.py",
    "objectives",
    "parallelize.py",
    "proof",
    "spec",
    "techniques",
    "torch_compat.py",
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


def test_folders_without_init_hold_code_of_the_cell(tmp_path, monkeypatch):
    write(tmp_path / "lab" / "models" / "vit", "lab.extras.deep")
    write(tmp_path / "lab" / "extras" / "deep")
    monkeypatch.syspath_prepend(str(tmp_path))
    cell = cell_of("lab.models.vit.technique")
    before = code_of(cell)
    own = {name for name in before.files if name.startswith("lab")}
    assert own == {"lab.models.vit.technique", "lab.extras.deep.helper"}
    (tmp_path / "lab" / "extras" / "deep" / "notes.py").write_text("unrelated = 2\n")
    assert code_of(cell).hash == before.hash
    (tmp_path / "lab" / "extras" / "deep" / "helper.py").write_text("scaled = print\n")
    assert changed_files(before.files, code_of(cell).files) == ["lab.extras.deep.helper"]


def test_what_pip_installed_is_no_code_of_the_cell_unless_it_names_it(tmp_path, monkeypatch):
    """`pip install --target`: a package of somebody else's in a folder of any name."""
    write(tmp_path / "mine" / "lab", "lab_of_others")
    write(tmp_path / "bought" / "lab_of_others", "lab_of_others")
    (tmp_path / "bought" / "lab_of_others-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "bought"))
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    cell = cell_of("lab.technique")
    assert {n for n in code_of(cell).files if n.startswith("lab")} == {"lab.technique"}
    named = code_of(cell_of("lab_of_others.technique")).files
    assert {n for n in named if n.startswith("lab")} == {
        "lab_of_others.technique",
        "lab_of_others.helper",
    }


def test_an_editable_install_of_a_package_is_code_of_the_cell(tmp_path, monkeypatch):
    """setuptools finds two packages of one folder by a finder of its own, not by a path."""
    write(tmp_path / "lab" / "parts")
    (tmp_path / "lab" / "__init__.py").write_text("")
    write(tmp_path / "lab", "lab.parts")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "lab"\nversion = "1"\n[tool.setuptools]\npackages = ["lab", "lab.parts"]\n'
        '[tool.setuptools.package-dir]\nlab = "lab"\n'
    )
    build = "from setuptools.build_meta import build_editable; build_editable('.')"
    made = [sys.executable, "-c", build]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "packages")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    site.addsitedir(str(tmp_path / "packages"))
    assert any("editable" in str(finder) for finder in sys.meta_path)
    own = {n for n in code_of(cell_of("lab.technique")).files if n.startswith("lab")}
    assert own == {"lab", "lab.technique", "lab.parts.helper"}


@pytest.mark.parametrize("with_torch", [True, False])
def test_torch_in_a_folder_of_the_python_path_is_no_code_of_the_cell(tmp_path, with_torch):
    """`pip install --target`, and a checkout of torch: no folder is called `site-packages`."""
    installed = Path(pytest.__file__).parents[1]
    for part in installed.iterdir():
        is_torch = not with_torch and part.name in ("torch", "torchgen", "functorch", "triton")
        folder = tmp_path / ("checkout" if is_torch else "libraries")
        folder.mkdir(exist_ok=True)
        (folder / part.name).symlink_to(part)
    write(tmp_path / "mine" / "lab")
    path = tmp_path / "mine" / "lab" / "technique.py"
    path.write_text("import torch, numpy\n" + path.read_text())
    folders = [ROOT, *(tmp_path / name for name in ("mine", "checkout", "libraries"))]
    program = (
        "from importlib.util import find_spec\n"
        "from tests.execution.test_code_hash import cell_of, code_of\n"
        "files = code_of(cell_of('lab.technique')).files\n"
        "print(find_spec('torch').origin, *files, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], text=True, capture_output=True, timeout=500,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    torch, *files = done.stdout.split()
    assert Path(torch).parents[1].name == ("libraries" if with_torch else "checkout")
    assert {name for name in files if not name.startswith("vitsweep/")} == {
        "lab.technique",
        "lab.helper",
    }


def test_an_import_that_finds_nothing_is_reported_and_one_that_may_fail_is_not(own):
    cell, folder = own
    path = folder / "helper.py"
    path.write_text(path.read_text() + "def later():\n    import nowhere.deep\n")
    said = r"helper\.py` imports `nowhere\.deep`, which is"
    with pytest.warns(MissingImportWarning, match=said) as found:
        looks = [code_of(cell).files for _ in range(2)]
    assert all("lab.helper" in files for files in looks)
    assert len(found) == 1, "a planner and each run look anew"
    path.write_text("try:\n    import nowhere\nexcept ImportError:\n    nowhere = None\n")
    assert "lab.helper" in code_of(cell).files


def test_files_that_were_added_removed_or_edited_have_changed() -> None:
    before = {"kept": "1", "edited": "1", "removed": "1"}
    now = {"kept": "1", "edited": "2", "added": "1"}
    assert changed_files(before, now) == ["added", "edited", "removed"]
    assert changed_files(before, before) == []
