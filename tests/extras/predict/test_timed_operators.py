"""Step times on a CPU follow from its own products at the shapes of the cells, in each precision."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cells import TINY, composer
from vitsweep.extras.predict import timed_operators
from vitsweep.extras.predict.prediction import CellPrediction, predict_cells
from vitsweep.extras.predict.timed_operators import (
    exchanges_of,
    keep_times,
    kept_file,
    kept_times,
    shapes_of,
    timed_key,
)
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def cells() -> dict[str, CellSpec]:
    here = Machine.here()
    return {
        name: plan_cell(composer().compose([*TINY, f"precision={name}"]), here).spec
        for name in ("fp32", "O1")
    }


def step_ms(found: dict[str, CellPrediction]) -> dict[str, float]:
    return {name: each.step_time.step_time_ms for name, each in found.items() if each.step_time}


def test_a_plan_times_what_its_cells_compute_once_and_never_at_other_shapes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real ranks. Nothing is timed for a command that only looks up what is known."""
    monkeypatch.setattr(timed_operators, "SECONDS", 550.0)  # after them a busy machine has no rates
    found = predict_cells(cells())
    assert set(step_ms(found)) == {"fp32", "O1"}, [each.reason for each in found.values()]
    [times] = kept_times().values()
    traces = [each.trace for each in found.values() if each.trace]
    assert {"float32", "bfloat16"} <= shapes_of(traces, ()).keys()
    assert not any(shapes_of(traces, times["operators"]).values())
    assert not exchanges_of(traces, times["collectives"])
    assert times["collectives"] or not exchanges_of(traces, ())
    monkeypatch.setattr(timed_operators, "_measure", None)
    assert step_ms(predict_cells(cells())) == step_ms(found)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config / "another machine"))
    assert step_ms(predict_cells(cells(), only_cached=True)) == {}


def test_half_precision_that_is_fast_at_no_shape_of_a_cell_is_predicted_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, one product of middle size in each format stood for all."""

    def times(_cell: CellSpec, shapes: Any, others: Any, exchanges: Any) -> dict[str, Any]:
        def row(kind: str, name: str, dtype: str, shape: Any) -> dict[str, Any]:
            us = 300.0 if dtype == "bfloat16" else 30.0
            facts = {"kind": kind, "name": name, "dtype": dtype, "shape": shape, "us": us}
            return facts | {"backward": False, "bytes_moved": 1000}

        wanted = [
            row("attention" if name == "attention" else "matmul", name, dtype, list(shape))
            | {"backward": backward}
            for dtype, group in shapes.items()
            for name, shape in group
            for backward in ((False, True) if name == "attention" else (False,))
        ]
        adds = [row("memory", "add", dtype, [1000]) for dtype in others]
        sent = [
            {"name": name, "dtype": dtype, "bytes": size, "ranks": 2, "us": 1.0}
            for name, dtype, size in exchanges
        ]
        return {"operators": [*adds, *wanted], "collectives": sent}

    monkeypatch.setattr(timed_operators, "_measure", times)
    found = predict_cells(cells())
    computing = {k: f.step_time.parts_ms["compute"] for k, f in found.items() if f.step_time}
    assert computing["O1"] > 3 * computing["fp32"]


def test_a_format_that_was_not_timed_has_no_step_time_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(*_: Any, **__: Any) -> Any:
        raise RuntimeError("is the machine busy?")

    monkeypatch.setattr(timed_operators, "_measure", busy)
    found = predict_cells(cells())
    assert step_ms(found) == {}
    assert all("is the machine busy?" in each.reason for each in found.values())
    assert all(each.peak_bytes for each in found.values()), "the memory is known all the same"


def test_kept_times_end_with_the_processor_and_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a virtual machine's processor stays, and a home folder is shared by many machines."""
    times: dict[str, Any] = {"operators": [], "collectives": []}
    keep_times(timed_key(1, 1), times)
    keep_times(timed_key(2, 1), times)
    assert len(kept_times()) == 2
    for name, value in (("torch_here", "2.99.0"), ("processor", "another one")):
        before = timed_key(2, 1)
        monkeypatch.setattr(timed_operators, name, lambda value=value: value)
        assert timed_key(2, 1) != before
        keep_times(timed_key(2, 1), times)
        assert list(kept_times()) == [timed_key(2, 1)]


def test_a_damaged_file_is_named_and_one_of_an_earlier_version_is_read() -> None:
    """Earlier versions kept whole steps beside the operators."""
    keep_times(timed_key(1, 1), {"operators": [], "collectives": []})
    path = kept_file()
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"torch": "2.13.0", "cores": 2, "setups": [{"ranks": 1}]}))
    assert list(kept_times()) == [timed_key(1, 1)]
    for text in ("{", json.dumps(tree | {"schema": 99}), json.dumps(tree | {"device": "Cray 1"})):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"`{path}`.* damaged"):
            kept_times()
    found = predict_cells(cells())
    assert step_ms(found) == {}
    assert all("is damaged" in each.reason for each in found.values())
