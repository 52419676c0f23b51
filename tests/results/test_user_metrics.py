"""Columns of the user's: checked, computed from a run, empty with a reason where they fail."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from pandas import DataFrame

import vitsweep
from tests.builders import ENVIRONMENT, PLAIN
from tests.cells import entry
from tests.command import ROOT
from tests.said import opening
from vitsweep.cli.main import run as command
from vitsweep.errors import BadValueError
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels
from vitsweep.results.metrics import METRICS, known_metrics, own_metrics
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import (
    attributes_of,
    check_metrics,
    own_definitions,
    user_metrics,
    with_user_metrics,
)
from vitsweep.tables.load import load
from vitsweep.tables.notes import empty_metrics
from vitsweep.tables.render import cell_text
from vitsweep.tables.sweep_tables import SweepTables

NODE = {"function": f"{__name__}.joules", "unit": "J", "label": "Energy", "better": "lower"}


def joules(record, samples):
    return 2 * record.metrics["images_per_second"] + len(samples["step_time_ms"])


def breaks(record, samples):
    return samples["nosuch"]


def clears(record, samples):
    for part in (record.metrics, record.spec, record.validity, record.environment, samples):
        part.clear()
    return 1.0


def changes_a_sample(record, samples):
    samples["step_time_ms"][0][0] = 0.0
    return 1.0


def exits(record, samples):
    raise SystemExit(3)


def stopped(record, samples):
    raise KeyboardInterrupt


def text(record, samples):
    return "3.0"


def nothing(record, samples):
    return None


def half_of_nothing(record, samples):
    return float("nan")


no_function = 3.0


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "mine").create()
    metrics_ = {
        "joules": NODE,
        "broken": NODE | {"function": f"{__name__}.breaks", "label": "Broken"},
    }
    store.append_command({"metrics": metrics_, "cells": ["a"]})
    return store


def run():
    return RunRecord(
        run_id="r", sweep="mine", cell_id="a", block="b", position=0, attempt=1,
        status=Status.measured, spec={"model": "vit_nano"}, metrics={"images_per_second": 3.0},
        samples={"step_time_ms": [[1.0], [1.0]], "warm_up_steps": 0, "skipped": [False]},
    )  # fmt: skip


def test_a_function_gives_a_column_and_one_that_raises_an_empty_one_with_its_reason(store):
    record = with_user_metrics(run(), own_definitions(store))
    assert record.metrics == {"images_per_second": 3.0, "joules": 8.0, "broken": None}
    assert "breaks raised KeyError: 'nosuch'" in record.environment["broken_reason"]
    assert record.status == Status.measured


def drawn(record, samples):
    return random.random() + np.random.rand()


def test_a_function_draws_what_follows_from_the_seed():
    [metric] = user_metrics({"drawn": NODE | {"function": f"{__name__}.drawn"}})
    found = [metric.compute(replace(run(), spec={"seed": seed})) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def with_metric(function, folder):
    store = Store(folder / "mine").create()
    node = NODE | {"function": f"{__name__}.{function}"}
    store.append_command({"metrics": {"mine": node}, "cells": ["a"]})
    return with_user_metrics(run(), own_definitions(store))


@pytest.mark.parametrize("function", ["clears", "changes_a_sample"])
def test_a_function_that_changes_what_it_is_given_changes_nothing_that_is_kept(function, tmp_path):
    record = with_metric(function, tmp_path)
    assert record == replace(run(), metrics=run().metrics | {"mine": 1.0})


def test_a_function_that_ends_the_process_leaves_the_column_empty(tmp_path):
    record = with_metric("exits", tmp_path)
    assert (record.status, record.metrics["mine"]) == (Status.measured, None)
    assert record.environment["mine_reason"].endswith("exits raised SystemExit: 3")
    with pytest.raises(KeyboardInterrupt):
        with_metric("stopped", tmp_path / "again")


@pytest.mark.parametrize(
    ("function", "shown"), [("text", "'3.0'"), ("nothing", "None"), ("half_of_nothing", "nan")]
)
def test_what_is_no_number_leaves_the_column_empty_and_is_shown(function, shown, tmp_path):
    record = with_metric(function, tmp_path)
    assert record.metrics["mine"] is None
    assert f"{function} returned {shown}," in record.environment["mine_reason"]


@pytest.mark.parametrize("table", ["cells", "runs"])
def test_no_column_of_a_record_or_table_can_be_replaced(table):
    columns = json.loads((ROOT / "tests/analysis/sample_schema.json").read_text())[table]
    for column in (c for c in columns if "." not in c):
        with pytest.raises(BadValueError, match=f"`metric.columns.{column}`"):
            check_metrics({column: NODE})
    for column in ("mfu_reason", "predicted_energy", "cell"):
        with pytest.raises(BadValueError, match=f"`{column}`"):
            check_metrics({column: NODE})


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_module", "no_such"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused(code, words, tmp_path, monkeypatch):
    (tmp_path / "broken_metrics.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadValueError, match=r"`metric\.columns\.joules\.function=") as refused:
        check_metrics({"joules": NODE | {"function": "broken_metrics.f"}})
    assert words in str(refused.value)


def test_a_plan_refuses_a_metric_that_cannot_be_computed():
    with pytest.raises(
        BadValueError, match=r"`metric\.columns\.energy\.function=nosuch\.f` cannot be"
    ):
        vitsweep.plan(["++metric.columns.energy={function:nosuch.f,unit:J,label:E,better:null}"])


def test_it_is_no_part_of_the_name_of_a_cell():
    definition = f"++metric.columns.mine={{function:{__name__}.joules,unit:J,label:E,better:null}}"
    cells = [entry("sharding=fsdp", definition), entry("sharding=ddp")]
    plan = SweepPlan({cell.cell_id: cell for cell in cells})
    assert list(cell_labels(plan).values()) == ["fsdp", "ddp"]


def test_tables_show_it_with_its_label_and_unit(store):
    store.freeze("a", {"cell_id": "a", "cell": {}})
    store.publish(with_user_metrics(run(), own_definitions(store)))
    cells = vitsweep.load(store.root).cells
    assert known_metrics(cells)["joules"].better == "lower"
    assert "joules" not in METRICS  # other sweeps do not have it
    assert list(cell_text(cells)["Energy (J)"]) == ["8.00"]
    assert "broken_reason" in cells


def test_what_has_no_value_is_reported_once_with_its_reason(store, capsys):
    store.freeze("a", {"cell_id": "a", "cell": {}})
    for number in range(4):
        record = replace(run(), run_id=f"r{number}", block=f"b{number}", spec=PLAIN)
        record = with_user_metrics(replace(record, environment=ENVIRONMENT), own_definitions(store))
        if number == 3:  # as if it had been computed
            record.metrics["broken"] = 2.0
            del record.environment["broken_reason"]
        store.publish(record)
    said = f"The metric `broken` has no value in 3 of 4 runs: {__name__}.breaks raised KeyError: 'nosuch'."
    assert empty_metrics(SweepTables.of(store).runs) == [said]
    assert command(["collect", str(store.root)]) == 0
    assert capsys.readouterr().out.count(said) == 1
    page = vitsweep.load(store.root).report().path.read_text()
    assert "`broken`" in page


def test_reasons_that_differ_are_counted_and_a_long_one_is_cut(store):
    reasons = [
        "f raised\n  ValueError: " + "x" * 999,
        "f raised KeyError: 1",
        "f raised KeyError: 1",
    ]
    runs = DataFrame({"status": "measured", "broken": None, "broken_reason": [*reasons, None]})
    runs.attrs = attributes_of(store)
    [said] = empty_metrics(runs)
    values = {"empty": 3, "runs": "3 runs", "reason": "f raised KeyError: 1"}
    assert said.startswith(opening("no_metric", metric="broken", **values))
    assert "1 more" in said
    assert said.endswith("`broken_reason` of `runs.parquet`.")
    assert empty_metrics(runs.iloc[:1])[0].endswith("xxx….")
    assert empty_metrics(runs.assign(broken_reason=None)) == []


def test_a_wrong_definition_is_refused_by_its_key():
    for column, change, words in [
        ("speedup", {}, "is a column of vitsweep's"),
        ("Energy J", {}, "is no name of a column"),
        ("joules", {"better": "more"}, "must be `higher`, `lower` or null"),
        ("joules", {"function": "joules"}, "must name a function"),
        ("joules", {"function": ".joules"}, "must name a function"),
        ("joules", {"function": f"{__name__}.nosuch"}, "cannot be imported"),
        ("joules", {"function": f"{__name__}.no_function"}, "is a float, which cannot be called"),
        ("joules", {"scale": 2}, "must have the keys"),
    ]:
        with pytest.raises(BadValueError, match=f"`metric.columns.{column}") as refused:
            check_metrics({column: NODE | change})
        assert words in str(refused.value)


def test_two_columns_of_one_label_are_refused():
    with pytest.raises(BadValueError, match=r"`Energy \(J\)`"):
        check_metrics({"joules": NODE, "more_joules": NODE})


def test_sweeps_read_together_have_the_metrics_of_both(store, tmp_path):
    other = Store(tmp_path / "other").create()
    other.append_command({"metrics": {"watts": NODE | {"label": "Power"}}, "cells": ["a"]})
    for one in (store, other):
        one.freeze("a", {"cell_id": "a", "cell": {}})
        one.publish(with_user_metrics(run(), own_definitions(one)))
    assert set(own_metrics(load(store))) == {"joules", "broken"}
    assert set(own_metrics(load(other))) == {"watts"}
    assert set(own_metrics(load(store, other))) == {"joules", "broken", "watts"}
