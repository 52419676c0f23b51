import math

import pytest

from analysis.cost import cost, epoch_hours
from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.cells import cells

BASELINES = dict.fromkeys(["base", "fast", "lean", "worse"], "base")


@pytest.fixture
def four():
    speeds = {"base": (100, 4.0), "fast": (200, 6.0), "lean": (120, 2.0), "worse": (110, 5.0)}
    spec = {
        "base": {},
        "fast": {"precision": "O2"},
        "lean": {"sharding": "fsdp"},
        "worse": {"memory": "recompute_blocks"},
    }
    return cells(
        table(
            *[
                run(c, f"b{i}", s, metrics={"peak_rss_gib": gib}, **spec[c])
                for c, (s, gib) in speeds.items()
                for i in range(3)
            ],
            run("dead", status=Status.out_of_memory, reason="no room", precision="bf16"),
        ),
        BASELINES,
    )


def test_epoch_hours_of_the_blog():
    # 0.65 h and 0.43 h per ImageNet-1k epoch are 547.5 and 827.6 img/s
    runs = table(
        *[run("base", f"b{i}", 547.5) for i in range(3)],
        *[run("fast", f"b{i}", 827.6, precision="O1") for i in range(3)],
    )
    hours = epoch_hours(cells(runs, BASELINES)).set_index("cell_id")
    assert hours.loc["fast", "epoch_hours"] == pytest.approx(0.43, abs=0.001)
    assert hours.loc["fast", "baseline_epoch_hours"] == pytest.approx(0.65, abs=0.001)
    assert hours.loc["fast", "epoch_hours_low"] == pytest.approx(hours.loc["fast", "epoch_hours"])


def test_cost_counts_every_rank(four):
    table = cost(four, price_per_rank_hour=2.0, epochs=10).set_index("cell_id")
    hours = 1_281_167 / 200 / 3600 * 10
    assert table.loc["fast", "rank_hours"] == pytest.approx(2 * hours)
    assert table.loc["fast", "money"] == pytest.approx(4 * hours)
    assert table.loc["fast", "saved"] == pytest.approx(4 * hours)
    assert "dead" not in table.index
    with pytest.raises(VitsweepError, match="price"):
        cost(four, price_per_rank_hour=-1, epochs=1)


def test_a_cell_without_baseline_has_hours_all_the_same():
    hours = epoch_hours(cells(table(run("base", "b0", 100)), {})).iloc[0]
    assert hours["epoch_hours"] > 0
    assert math.isnan(hours["baseline_epoch_hours"])
