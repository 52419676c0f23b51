"""`sweep.replicate=seed` as a user types it."""

import pandas as pd
import pytest

from tests.command import Command


@pytest.mark.full
def test_seeds_are_cells_and_a_setting_is_one_row(vitsweep: Command) -> None:
    asked = ("-m", "seed=1,2", "precision=fp32,O1", "sweep.replicate=seed", "sweep.report=true")
    done = vitsweep(*asked)

    assert done.returncode == 0, done.stderr
    assert "2 settings, all measured; " in done.stdout
    assert "replicates: 2" in done.stdout
    cells = vitsweep.cells().set_index(["precision", "seed"])
    assert len(cells) == cells["cell_id"].nunique() == 4
    own = {seed: cells.loc[("fp32", seed), "cell_id"] for seed in (1, 2)}
    assert cells["baseline_cell_id"].to_dict() == {key: own[key[1]] for key in cells.index}
    root = vitsweep.store.root
    found = pd.read_parquet(root / "replicates.parquet").set_index("precision")
    assert found["replicates"].to_dict() == {"fp32": 2, "O1": 2}
    of_seeds = cells.loc["O1", "speedup"]
    assert found.loc["O1", "speedup"] == pytest.approx((of_seeds[1] * of_seeds[2]) ** 0.5)
    page = (root / "report" / "index.html").read_text()
    assert "Settings over seed" in page
    assert (root / "report" / "replicates.csv").exists()

    shown = vitsweep("collect", "default", quick=False).stdout
    assert "2 settings, all measured; " in shown
