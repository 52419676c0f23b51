"""A race from Python, as a script and a notebook call it."""

import pytest

import vitsweep
from tests.api.test_functions import QUICK, TINY, shown_in_a_notebook

RACE = "sweep.search=race"


def test_a_race_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(vitsweep.BadValueError, match=r"`sweep\.search=race`"):
        vitsweep.sweep([*TINY, RACE], name="lonely", show=False)
    assert not (tmp_path / "results").exists()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
def test_a_notebook_races_and_shows_who_won(tmp_path):
    grid = ["precision=fp32,O1", "optimizer=adamw_loop,adamw_foreach,adamw_fused"]
    typed = [*QUICK, *grid, RACE, "sweep.confirm=3", "sweep.minutes=3"]
    cells = [
        "import vitsweep",
        f"sweep = vitsweep.sweep({typed}, name='race')",
        "sweep",
        "sweep.race()",
    ]
    shown = shown_in_a_notebook(cells, tmp_path)
    assert "in throughput: " in shown[2][-1]["text/html"]
    assert "to_leader" in shown[3][-1]["text/html"]
