"""`vitsweep.race`, as a script and a notebook call it."""

import pytest

import vitsweep
from tests.api.test_functions import QUICK, TINY, shown_in_a_notebook
from vitsweep.extras.race import functions


def test_a_budget_is_given_once():
    with pytest.raises(
        vitsweep.BadValueError, match=r"`sweep\.minutes=1` and `sweep\.minutes=2.0` set"
    ):
        vitsweep.race("sweep.minutes=1", minutes=2)


def test_a_race_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        vitsweep.BadValueError, match="has one cell: a race needs two cells or more"
    ):
        vitsweep.race(TINY, name="lonely", show=False)
    assert not (tmp_path / "results").exists()


def test_a_race_on_a_cluster_waits_for_its_rounds(monkeypatch):
    asked = []
    monkeypatch.setattr(functions, "sweep", lambda texts, **more: asked.append((texts, more)))
    functions.race("precision=O1,O2", minutes=5, launcher="slurm")
    functions.race(["precision=O1,O2", "hydra.launcher.wait=false"], launcher="slurm", name="mine")
    assert asked[0][0] == [
        "precision=O1,O2", "sweep.search=race", "sweep.minutes=5.0", "hydra.launcher.wait=true",
    ]  # fmt: skip
    assert asked[1][0][1:] == ["hydra.launcher.wait=false", "sweep.search=race"]
    assert asked[1][1] == {"launcher": "slurm", "name": "mine"}


@pytest.mark.parametrize("minutes", [0, "1", float("nan"), True])
def test_a_race_without_time_is_refused(minutes):
    with pytest.raises(
        vitsweep.BadValueError, match=f"`minutes={minutes!r}` must be a number above 0"
    ):
        vitsweep.race("precision=O1,O2", minutes=minutes)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
def test_a_notebook_races_and_shows_who_won(tmp_path):
    grid = ["precision=fp32,O1", "optimizer=adamw_loop,adamw_foreach,adamw_fused"]
    cells = [
        "import vitsweep",
        f"sweep = vitsweep.race({[*QUICK, *grid, 'sweep.confirm=3']}, minutes=3, name='race')",
        "sweep",
        "sweep.race()",
    ]
    shown = shown_in_a_notebook(cells, tmp_path)
    assert "leads" in shown[2][-1]["text/html"]
    assert "to_leader" in shown[3][-1]["text/html"]
