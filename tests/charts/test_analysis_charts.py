"""Roofline, effects, two days, and the Pareto front."""

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex

from tests.builders import run, table
from tests.noise import normal, simulate
from tests.tables.test_effects import AVERAGE, LEVELS, TOGETHER, grid, simulated
from tests.tables.test_roofline import METRICS
from vitsweep.charts import effects, pareto, roofline, style
from vitsweep.tables.cells import cells
from vitsweep.tables.effects import effects as effects_table
from vitsweep.tables.roofline import roofline as roofline_table
from vitsweep.tables.sweep_tables import SweepTables


def labels(axes):
    found = axes.get_legend() or axes.figure.legends[0]
    return [text.get_text() for text in found.get_texts()]


def names(axes):
    return [tick.get_text() for tick in axes.get_yticklabels()]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def roofs(device):
    environment = {"device": device, "compute_dtype": "bfloat16"}
    unknown = {} if "H200" in device else {"mfu_of_measured_peak": None, "peak_tflops": None}
    records = [
        run(f"c{i}", metrics=METRICS | unknown, environment=environment, precision=p)
        for i, p in enumerate(("fp32", "O1"))
    ]
    return roofline_table(cells(table(*records), {}))


def test_the_roofline_has_a_point_per_cell_and_phase_below_its_limits():
    found = roofs("NVIDIA H200")
    axes = roofline.draw(found).axes[0]
    assert labels(axes) == [
        "500 TFLOP/s, bfloat16", "Forward", "Backward", "Optimizer", "fp32", "O1"
    ]  # fmt: skip
    points = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert len(points) == 6
    assert {to_hex(p.get_color()) for p in points} == {
        style.PHASES[f"{p}_ms"] for p in ("forward", "backward", "optimizer")
    }
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "4.8 TB/s" in roofline.roofs(found)


def test_each_roof_has_its_own_line_and_text():
    near, far = {"limit_tflops": 506.0}, {"limit_tflops": 250.0}
    one = roofs("NVIDIA H200")
    rows = [
        one,
        one.assign(compute_dtype="float16", **near),
        one.assign(compute_dtype="tf32", **far),
    ]
    axes = roofline.draw(pd.concat(rows, ignore_index=True)).axes[0]
    assert [text for text in labels(axes) if "TFLOP/s" in text] == [
        "500 TFLOP/s, bfloat16", "506 TFLOP/s, float16", "250 TFLOP/s, tf32"
    ]  # fmt: skip
    assert sum(len(line.get_xdata()) == 200 for line in axes.lines) == 3


def test_the_front_of_long_names_leaves_the_axes_their_width():
    names = [f"c{n}" for n in range(3)]
    runs = table(
        *(
            run(
                c,
                speed,
                images_per_second=speed,
                metrics={"peak_rss_gib": speed},
                precision=c + "x" * 70,
            )
            for c, speed in zip(names, (100.0, 110.0, 120.0), strict=True)
        )
    )
    figure = pareto.draw(pareto.pareto_front(cells(runs, dict.fromkeys(names))))
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.6
    assert len(figure.legends[0].get_texts()) == 3


def test_a_roofline_without_limits_is_drawn_and_says_so():
    found = roofs("AMD EPYC 7B13")
    axes = roofline.draw(found).axes[0]
    assert sum(len(line.get_xdata()) == 1 for line in axes.lines) == 6
    assert not texts(axes)
    assert roofline.roofs(found) == "Limits: no matmul rate is known; no memory bandwidth is known."


def test_effects_have_a_row_per_technique_and_name_the_company_that_changes_them_most():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    found = effects_table(*simulated(logs, specs, normal(0.01)))
    axes = effects.draw(found).axes[0]
    assert set(names(axes)) == set(found["technique"])
    row = next(t for t in texts(axes) if t.startswith("1.2") and "sdpa_math" in t)
    assert row.endswith("] with sdpa_math")
    assert axes.get_xlabel() == "Throughput over that of the baselines' choice (x)"


def test_effects_are_in_the_report_only_where_choices_were_crossed():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    runs, baselines = simulated(logs, specs, normal(0.01))
    assert len(effects.table_of(SweepTables.from_runs(runs, baselines, cells(runs, baselines))))
    alone = {"base": {}, "O1": {"precision": "O1"}, "fsdp": {"sharding": "fsdp"}}
    truth = {"base": 1.0, "O1": 1.3, "fsdp": 0.9}
    runs, baselines = simulate(truth, normal(0.01), np.random.default_rng(0), specs=alone)
    assert effects.table_of(SweepTables.from_runs(runs, baselines, cells(runs, baselines))).empty
