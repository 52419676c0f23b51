"""Effects, and two days."""

import re

import numpy as np

from tests.builders import from_runs
from tests.noise import normal, simulate
from tests.tables.test_effects import AVERAGE, LEVELS, TOGETHER, grid, simulated
from vitsweep.charts import effects, style
from vitsweep.tables.cells import cells
from vitsweep.tables.effects import effects as effects_table


def labels(axes):
    found = axes.get_legend() or axes.figure.legends[0]
    return [text.get_text() for text in found.get_texts()]


def names(axes):
    return [tick.get_text() for tick in axes.get_yticklabels()]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_effects_have_a_row_per_technique_and_name_the_company_that_changes_them_most():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    found = effects_table(*simulated(logs, specs, normal(0.01)))
    axes = effects.draw(found).axes[0]
    assert set(names(axes)) == {t.split("=")[1] for t in found["technique"]}
    marks = {line.get_marker() for line in axes.lines if line.get_markerfacecolor() == style.PAPER}
    assert marks == {"o"}  # a diamond is a published figure
    row = next(t for t in texts(axes) if t.startswith("1.2") and "sdpa_math" in t)
    assert row.endswith("] with sdpa_math")
    assert re.fullmatch(r"Throughput .*baseline.* \(x\)", axes.get_xlabel())


def test_effects_are_in_the_report_only_where_choices_were_crossed():
    logs, specs = grid(LEVELS, AVERAGE, TOGETHER)
    runs, baselines = simulated(logs, specs, normal(0.01))
    assert len(effects.table_of(from_runs(runs, baselines, cells(runs, baselines))))
    alone = {"base": {}, "O1": {"precision": "O1"}, "fsdp": {"sharding": "fsdp"}}
    truth = {"base": 1.0, "O1": 1.3, "fsdp": 0.9}
    runs, baselines = simulate(truth, normal(0.01), np.random.default_rng(0), specs=alone)
    assert effects.table_of(from_runs(runs, baselines, cells(runs, baselines))).empty
