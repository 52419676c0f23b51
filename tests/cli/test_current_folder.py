"""What is imported from the folder one stands in: nothing, but own code that is typed and nowhere else."""

import os
import sys
from pathlib import Path

import pytest

from tests.canaries import plant
from tests.command import NO_REPORT, QUICK, Command
from vitsweep.interpreters import find_here, folder_on_path
from vitsweep.spec.from_yaml import wrong_function

OWN = """
from torch import nn

def build(num_classes=10, side=8):
    blocks = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 32), blocks, nn.Linear(32, num_classes))
"""
TYPED = ("model=module", "model.target=own_code.build", "+model.shape_arguments.side=resolution_px")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if os.path.abspath(p) != str(tmp_path)])
    return tmp_path


def test_own_code_is_found_in_the_current_folder_last(here: Path) -> None:
    before = [*sys.path]
    (here / "typed_for_a_test.py").write_text("def f(): pass")
    (here / "folder_for_a_test").mkdir()
    find_here("nowhere_at_all.models")
    assert sys.path == before
    assert list(wrong_function("x", "typed_for_a_test.f", "()")) == []
    find_here("folder_for_a_test.models")
    assert sys.path == [*before, str(here)]
    assert folder_on_path() == ("last", str(here))
    sys.path.insert(0, "")  # as `python -m` or a notebook has it
    assert folder_on_path() == ("first", str(here))


def test_a_name_that_is_here_and_elsewhere_is_refused_with_both(here: Path) -> None:
    (here / "numpy").mkdir()  # without `__init__.py` it would not be imported
    find_here("numpy.linalg")
    for name in ("colorsys", "json"):
        (here / f"{name}.py").write_text("raise SystemExit")
        [reason] = wrong_function("task.held_out", f"{name}.f", "()")
        assert f"`task.held_out={name}.f`" in reason
        assert str(here / f"{name}.py") in reason
        assert os.path.dirname(os.__file__) in reason
    sys.path.insert(0, str(here))  # then Python was told which
    find_here("colorsys")


@pytest.mark.slow
def test_own_code_runs_by_its_name_in_a_folder_full_of_traps(tmp_path: Path) -> None:
    canary = plant(tmp_path)
    (tmp_path / "own_code.py").write_text(OWN)
    words = [w for w in QUICK if not w.startswith("model.")]
    running = Command(tmp_path).start(*words, *TYPED, NO_REPORT, quick=False, python=["-P"])
    out, error = running.communicate(timeout=300)
    assert running.returncode == 0, out + error
    assert not canary.exists(), canary.read_text()
