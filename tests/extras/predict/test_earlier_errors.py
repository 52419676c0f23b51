"""Records of earlier sweeps correct the predictions of the next plan on the same device."""

import shutil
from pathlib import Path

import pandas
import pytest

from vitsweep.extras.predict.admission import PREDICTED, earlier_errors
from vitsweep.extras.predict.step_time import NO_RESIDUALS
from vitsweep.results.store import Store

SAMPLE = Path(__file__).parents[3] / "analysis" / "sample"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One earlier sweep, whose steps took 1.5 times as long as predicted."""
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    cells = pandas.read_parquet(SAMPLE / "cells.parquet")
    cells[PREDICTED], cells["shared_device"] = cells["step_time_ms"] / 1.5, False
    cells.to_parquet(earlier / "cells.parquet")
    return tmp_path


def test_records_of_the_same_device_correct_the_next_plan(results: Path) -> None:
    cells = pandas.read_parquet(results / "earlier" / "cells.parquet")
    measured = cells[cells["status"] == "measured"]
    [device] = measured["device"].dropna().unique()
    model = earlier_errors(Store(results / "next"), device)
    assert model.records == len(measured)
    chosen = {"model": str(measured["model"].iloc[0])}
    shift, _ = model.correction(chosen, 0.2)
    assert 0.15 < shift <= 0.45  # log 1.5 = 0.41, shared out among the device and the choices
    assert earlier_errors(Store(results / "next"), "Another device") is NO_RESIDUALS
    assert earlier_errors(Store(results / "next"), None) is NO_RESIDUALS


def test_records_of_a_machine_that_others_used_correct_nothing(results: Path) -> None:
    path = results / "earlier" / "cells.parquet"
    pandas.read_parquet(path).assign(shared_device=True).to_parquet(path)
    assert earlier_errors(Store(results / "next"), _device(results)) is NO_RESIDUALS


def test_damaged_tables_and_tables_without_predictions_are_left_out(results: Path) -> None:
    (results / "damaged").mkdir()
    (results / "damaged" / "cells.parquet").write_bytes(b"no parquet")
    (results / "plain").mkdir()
    shutil.copy(SAMPLE / "cells.parquet", results / "plain")
    before = earlier_errors(Store(results / "next"), _device(results)).records
    shutil.rmtree(results / "earlier")
    assert before > 0
    assert earlier_errors(Store(results / "next"), "x") is NO_RESIDUALS


def _device(results: Path) -> str:
    cells = pandas.read_parquet(results / "earlier" / "cells.parquet")
    return str(cells["device"].dropna().iloc[0])
