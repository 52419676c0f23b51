"""Step times on a CPU follow from its own products at the shapes of the cells, in each precision."""

from pathlib import Path
from typing import Any

import pytest

from tests.cells import TINY, composer
from vitsweep.extras.predict import calibrate, calibration
from vitsweep.extras.predict.calibration import kept_calibration, timed_key
from vitsweep.extras.predict.measured_rates import exchanges_of, shapes_of
from vitsweep.extras.predict.prediction import CellPrediction, predict_cells
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.rates.profile import device_name
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
    found = predict_cells(cells())
    assert set(step_ms(found)) == {"fp32", "O1"}, [each.reason for each in found.values()]
    [times] = kept_calibration(str(device_name("cpu"))).timed.values()
    traces = [each.trace for each in found.values() if each.trace]
    assert {"float32", "bfloat16"} <= shapes_of(traces, ()).keys()
    assert not any(shapes_of(traces, times["operators"]).values())
    assert not exchanges_of(traces, times["collectives"])
    assert times["collectives"] or not exchanges_of(traces, ())
    monkeypatch.setattr(calibrate, "_measure", None)
    assert step_ms(predict_cells(cells())) == step_ms(found)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config / "another machine"))
    assert step_ms(predict_cells(cells(), only_cached=True)) == {}


def test_half_precision_that_is_fast_at_no_shape_of_a_cell_is_predicted_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, one product of middle size in each format stood for all."""

    def times(*_: Any, quick: Any) -> dict[str, Any]:
        shapes, _exchanges, others = quick

        def row(kind: str, name: str, dtype: str, shape: Any) -> dict[str, Any]:
            us = 300.0 if dtype == "bfloat16" else 30.0
            facts = {"kind": kind, "name": name, "dtype": dtype, "shape": shape, "us": us}
            return facts | {"backward": False, "bytes_moved": 1000}

        wanted = [
            row("attention" if name == "attention" else "matmul", name, dtype, list(shape))
            for dtype, group in shapes.items()
            for name, shape in group
        ]
        adds = [row("memory", "add", dtype, [1000]) for dtype in others]
        return {"operators": [*adds, *wanted], "collectives": [], "late": []}

    monkeypatch.setattr(calibrate, "_measure", times)
    found = predict_cells(cells())
    computing = {k: f.step_time.parts_ms["compute"] for k, f in found.items() if f.step_time}
    assert computing["O1"] > 3 * computing["fp32"]


def test_a_format_that_was_not_timed_has_no_step_time_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(*_: Any, **__: Any) -> Any:
        raise RuntimeError("is the machine busy?")

    monkeypatch.setattr(calibrate, "_measure", busy)
    found = predict_cells(cells())
    assert step_ms(found) == {}
    assert all("is the machine busy?" in each.reason for each in found.values())
    assert all(each.peak_bytes for each in found.values()), "the memory is known all the same"


def test_kept_times_end_with_the_processor_and_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a virtual machine's processor stays, and a home folder is shared by many machines."""
    device = str(device_name("cpu"))
    times = {"operators": [], "collectives": []}
    kept_calibration(device).keep_timed(timed_key(1, 1), times)
    kept_calibration(device).keep_timed(timed_key(2, 1), times)
    assert len(kept_calibration(device).timed) == 2
    for name, value in (("torch_here", "2.99.0"), ("processor", "another one")):
        before = timed_key(2, 1)
        monkeypatch.setattr(calibration, name, lambda value=value: value)
        assert timed_key(2, 1) != before
        kept_calibration(device).keep_timed(timed_key(2, 1), times)
        assert list(kept_calibration(device).timed) == [timed_key(2, 1)]
