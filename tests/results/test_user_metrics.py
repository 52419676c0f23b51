"""Columns of the user's: checked, computed from a run, empty with a reason where they fail."""

import pytest

import vitsweep
from vitsweep.errors import BadValueError
from vitsweep.results import metrics
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import check_metrics, register, with_user_metrics
from vitsweep.tables.show import presented

NODE = {"function": f"{__name__}.joules", "unit": "J", "label": "Energy", "better": "lower"}


def joules(record, samples):
    return 2 * record.metrics["images_per_second"] + len(samples["step_time_ms"])


def breaks(record, samples):
    return samples["nosuch"]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "mine").create()
    metrics_ = {
        "joules": NODE,
        "broken": NODE | {"function": f"{__name__}.breaks", "label": "Broken"},
    }
    store.append_command({"metrics": metrics_, "cells": ["a"]})
    yield store
    for column in metrics_:
        metrics.METRICS.pop(column, None)


def run():
    return RunRecord(
        run_id="r", sweep="mine", cell_id="a", block="b", position=0, attempt=1,
        status=Status.measured, spec={"model": "vit_nano"}, metrics={"images_per_second": 3.0},
        samples={"step_time_ms": [[1.0], [1.0]]},
    )  # fmt: skip


def test_a_function_gives_a_column_and_one_that_raises_an_empty_one_with_its_reason(store):
    record = with_user_metrics(run(), store)
    assert record.metrics == {"images_per_second": 3.0, "joules": 8.0, "broken": None}
    assert "breaks raised KeyError: 'nosuch'" in record.environment["broken_reason"]
    assert record.status == Status.measured


def test_tables_show_it_with_its_label_and_unit(store):
    store.freeze("a", {"cell_id": "a", "cell": {}})
    store.publish(with_user_metrics(run(), store))
    cells = vitsweep.load(store.root).cells
    assert metrics.METRICS["joules"].better == "lower"
    assert list(presented(cells)["Energy (J)"]) == ["8.00"]
    assert "broken_reason" in cells


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("speedup", {}, "is a column of vitsweep's"),
        ("Energy J", {}, "is no name of a column"),
        ("joules", {"better": "more"}, "must be `higher`, `lower` or null"),
        ("joules", {"function": "joules"}, "must name a function"),
        ("joules", {"function": f"{__name__}.nosuch"}, "cannot be imported"),
        ("joules", {"scale": 2}, "must have the keys"),
    ],
)
def test_a_wrong_definition_is_refused_by_its_key(column, change, words):
    with pytest.raises(BadValueError, match=f"`metric.columns.{column}") as refused:
        check_metrics({column: NODE | change})
    assert words in str(refused.value)


def test_two_columns_of_one_label_are_refused():
    with pytest.raises(BadValueError, match="have the same label and unit, `Energy \\(J\\)`"):
        check_metrics({"joules": NODE, "more_joules": NODE})


def test_registering_twice_changes_nothing(store):
    register(store)
    before = dict(metrics.METRICS)
    register(store)
    assert before == metrics.METRICS
