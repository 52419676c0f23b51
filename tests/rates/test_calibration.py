"""What is kept of a device: quick rates for an hour, rates of products, what optional features have."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitsweep.rates import calibration
from vitsweep.rates.calibration import KeptRates, kept_rates, matmul_rates, path_for


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_quick_rates_are_kept_for_an_hour_beside_what_a_feature_keeps(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeptRates(device="A CPU @ 2.5GHz", others={"timed": {"2x1": 1}}).keep()
    kept_rates("A CPU @ 2.5GHz").keep_quick("host cpu 2x1", {"float32": 0.1})  # as a run does
    found = kept_rates("A CPU @ 2.5GHz")
    assert path_for("A CPU @ 2.5GHz").is_relative_to(config)
    assert found.others == {"timed": {"2x1": 1}}
    assert found.quick_rates("host cpu 2x1") == {"float32": 0.1}
    assert found.quick_rates("host cpu 1x1") == {}
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert found.quick_rates("host cpu 2x1") == {}
    found.keep_quick("host cpu 1x1", {"float32": 0.2})
    assert [*kept_rates("A CPU @ 2.5GHz").quick] == ["host cpu 1x1"]


def test_a_file_of_another_device_is_not_read() -> None:
    KeptRates(device="Cray 1").keep()
    with pytest.raises(ValueError, match="keeps rates of Cray 1, not of Cray-1: remove it"):
        kept_rates("Cray-1")


def test_rates_of_products_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def run(*_: Any, **__: Any) -> SimpleNamespace:
        measured.append(1)
        return SimpleNamespace(stdout='{"float32": 80.0, "bfloat16": 0.3}')

    monkeypatch.setattr(calibration.subprocess, "run", run)
    assert matmul_rates("Cray-1") == {}
    rates = matmul_rates("Cray-1", measure=True)
    assert matmul_rates("Cray-1", measure=True) == rates == {"float32": 80.0, "bfloat16": 0.3}
    assert len(measured) == 1


def test_rates_of_products_follow_from_those_of_a_run() -> None:
    kept_rates("Cray-1").keep_quick("host cpu 2x4", {"float32": 0.4, "bfloat16": 0.8})
    assert matmul_rates("Cray-1") == {"float32": 100.0, "bfloat16": 200.0}
