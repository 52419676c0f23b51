"""Bounds of a cell's classes by hand; without rates nothing is said and nothing is drawn."""

from pathlib import Path
from typing import Any

import pytest

import vitsweep
from tests.builders import run
from tests.tables.test_roofline import METRICS
from tests.traced import traced
from vitsweep.errors import VitsweepError
from vitsweep.extras.explain.bounds import TAKEN_OFF, bound_text, bounds
from vitsweep.extras.explain.causes import REST
from vitsweep.extras.explain.charts import bounds as chart
from vitsweep.results.store import Store
from vitsweep.spec.measurement import TimeClass
from vitsweep.tables.sweep_tables import SweepTables

ROWS = [  # 500 TFLOP/s and 2000 GB/s
    [0, 0, str(TimeClass.products), "aten::mm", "", 1, 40.0, 5e12],  # 10 ms
    [0, 0, str(TimeClass.elementwise), "aten::gelu", "", 1, 6.0, 4e9],  # 2 ms
    [0, 0, str(TimeClass.copies), "aten::copy_", "", 1, 1.0, 4e9],  # faster than memory
    [0, 0, str(TimeClass.attention), "aten::sdpa", "", 1, 8.0, None],  # not counted
    [0, 0, str(TimeClass.optimizer), "aten::add_", "", 1, 7.0, 0.0],
]


def store(folder: Path, trace: bool = True, **metrics: Any) -> Store:
    made = Store(folder / "s").create()
    environment = {"device": "some GPU", "compute_dtype": "bfloat16"}
    known = METRICS | {"step_time_ms": 65.0, "copy_gb_per_s": 2000.0} | metrics
    for block in ("b0", "b1", "b2"):
        record = run("aa", block, metrics=known, environment=environment, sweep="s",
                     images_per_step=128, world_size=2)  # fmt: skip
        made.save_run(traced(record, ROWS, 58.0) if trace else record)
    made.append_command({"baselines": {"aa": "aa"}, "command": "python -m vitsweep"})
    return made


def test_the_bound_of_a_class_is_its_work_at_the_rate_of_the_device(tmp_path: Path) -> None:
    found = bounds(SweepTables.of(store(tmp_path)), "aa", "O2")
    rows = found.causes.set_index("cause")
    assert rows.loc[[TAKEN_OFF, REST], "ms"].tolist() == [-4.0, 7.0]
    assert rows["ms"].sum() == pytest.approx(found.step_ms)
    held = (2 * 0.4 + 0.4 + 2 * 0.8) * 2**30 / 2e9
    least = {TimeClass.products: 10, TimeClass.elementwise: 2, TimeClass.copies: 2}
    for kind, bound in (least | {TimeClass.optimizer: held}).items():
        assert rows.at[kind, "bound_ms"] == pytest.approx(bound)
        assert rows.at[kind, "gap_ms"] == pytest.approx(rows.at[kind, "ms"] - bound)
    assert rows.loc[[TimeClass.attention, TAKEN_OFF, REST], "bound_ms"].isna().all()
    assert "matrix products 40.0 ms, at least 10.0; " in found.sentence
    assert found.notes[0].startswith("Rates: 500,000 GFLOP/s in bfloat16 (matmul rate measured")
    assert "Caches serve casts and copies faster" in found.notes[0]
    drawn = chart.draw(chart.rows_of([found]))
    assert [p.get_width() for p in drawn.axes[0].patches][:2] == [40.0, pytest.approx(10.0)]
    text = bound_text(found)
    assert text["at least"].iloc[0] == "10.0"
    assert text["cause"].iloc[-1] == "measured step"
    assert text["ms a step"].iloc[-1] == "65.0"


def test_without_rates_nothing_is_said_of_a_bound_and_nothing_is_drawn(tmp_path: Path) -> None:
    tables = SweepTables.of(store(tmp_path, copy_gb_per_s=None))
    found = bounds(tables, "aa", "O2")
    assert found.causes["bound_ms"].isna().all()
    assert "nothing is said of a bound" in found.sentence
    assert chart.table_of(tables).empty
    answer = vitsweep.load(tmp_path / "s").explain("aa")
    assert answer.figure is None


def test_a_cell_without_traces_is_told_with_the_command_that_measures_some(tmp_path: Path) -> None:
    store(tmp_path, trace=False)
    with pytest.raises(VitsweepError, match=r"has no traced steps in .*vitsweep explain 'aa' B"):
        vitsweep.load(tmp_path / "s").explain("aa")
