"""The calibration of a machine: read back for its device and torch, fitted to whole steps, interpolated."""

import json
import time
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras.predict.traces import exchange, moved, product, trace_of
from vitsweep.extras.predict.calibrate import fitted
from vitsweep.extras.predict.calibration import (
    Calibration,
    RankSetup,
    kept_calibration,
    load_calibration,
)
from vitsweep.extras.predict.measured_rates import CalibratedRates
from vitsweep.extras.predict.step_time import StepTrace, predict_step
from vitsweep.rates import calibration as calibration_module
from vitsweep.rates.calibration import kept_rates, matmul_rates, path_for
from vitsweep.rates.profile import Curve

GFLOPS, GB_S = 100, 10


def setup(ranks: int = 1) -> RankSetup:
    """A machine of 100 GFLOP/s and 10 GB/s, whose all-reduce moves 1 GB/s after 100 us."""
    products = [
        {"kind": "matmul", "name": "addmm", "dtype": "float32", "shape": [1, m, n, k], "backward": by_weight,
         "bytes_moved": 0, "us": 2 * m * n * k / GFLOPS / 1e3}
        for m in (64, 1024) for n in (128, 1024) for k in (128, 1024) for by_weight in (False, True)
    ]  # fmt: skip
    adds = [
        {"kind": "memory", "name": "add", "dtype": "float32", "shape": [n], "backward": False,
         "bytes_moved": 12 * n, "us": 12 * n / GB_S / 1e3}
        for n in (1000, 10**6)
    ]  # fmt: skip
    sent = [
        {"name": "all_reduce", "bytes": size, "ranks": ranks, "us": 100 + size / 1e3}
        for size in (1000, 10**6, 10**8)
    ]
    collectives = sent if ranks > 1 else []
    return RankSetup(ranks=ranks, threads=1, operators=products + adds, collectives=collectives)


def rates(of: RankSetup, ranks_per_node: int | None = None, cores: int = 2) -> CalibratedRates:
    here = ranks_per_node or of.ranks
    return CalibratedRates(of, ranks_per_node=here, threads=1, cores=cores, title="a machine")


def step(scale: int, dispatches: int) -> StepTrace:
    operators = (
        replace(product(64 * scale, 512, 512), dtype="float32"),
        replace(moved(12000 * scale, count=20), dtype="float32"),
    )
    return trace_of(*operators, dispatches=dispatches, device="cpu")


def test_shapes_between_measured_ones_have_their_rate() -> None:
    found = rates(setup())
    between = replace(product(300, 300, 300), dtype="float32")
    assert found.operator_us(between) == pytest.approx(between.flops / GFLOPS / 1e3, rel=0.01)
    unknown_name = replace(moved(60_000), name="never_measured", dtype="float32")
    assert found.operator_us(unknown_name) == pytest.approx(60_000 / GB_S / 1e3, rel=0.01)


def test_an_exchange_within_a_step_waits_for_the_cores_whatever_its_size() -> None:
    waits = replace(setup(2), message_us=2000.0)
    for size in (1000, 10**6):
        sent = replace(exchange(size), group_ranks=2, group_nodes=1)
        assert rates(waits).collective_us(sent) == 2000 + rates(setup(2)).collective_us(sent)


def test_one_disturbed_point_does_not_explode_beyond_the_measured_ones() -> None:
    """Time grows with the size at most in proportion, and does not shrink."""
    disturbed = Curve({256: 1.0, 8192: 10_000.0}, slope_ends=True)
    assert disturbed(81_920) == pytest.approx(100_000)
    assert Curve({256: 5.0, 8192: 1.0}, slope_ends=True)(81_920) == pytest.approx(1)


def test_products_of_the_backward_pass_have_rates_of_their_own() -> None:
    """Also where the tokens are fewer than rows and columns of the weight."""
    slow = [
        o | {"name": "mm", "us": 3 * o["us"], "dtype": dtype}
        for o in setup().operators
        if o["kind"] == "matmul"
        for dtype in ("float32", "bfloat16")
    ]
    found = rates(replace(setup(), operators=[*setup().operators, *slow]))
    few_tokens = product(68, 512, 2048, phase="backward")
    by_weight = product(512, 2048, 68, phase="backward")
    forward = product(68, 2048, 512)
    for operator, times in ((few_tokens, 3), (by_weight, 3), (forward, 1)):
        name = "addmm" if operator is forward else "mm"
        us = found.operator_us(replace(operator, name=name, dtype="float32"))
        assert us == pytest.approx(times * operator.flops / GFLOPS / 1e3, rel=0.01)
    assert found.operator_us(replace(few_tokens, name="mm", dtype="bfloat16")) > 0


def test_sums_of_half_precision_have_a_time_of_their_own() -> None:
    two = setup(ranks=2)
    slow = [c | {"dtype": "bfloat16", "us": 2 * c["us"]} for c in two.collectives]
    found = rates(replace(two, collectives=[*two.collectives, *slow]))
    plain = exchange(10**6, ranks=2)
    half = replace(plain, dtype="bfloat16")
    assert found.collective_us(half) == pytest.approx(2 * found.collective_us(plain))


def test_attention_that_no_time_was_left_for_is_predicted_as_products() -> None:
    attention = replace(
        product(1, 1, 1),
        kind="attention",
        name="attention",
        dtype="float32",
        shape=(2, 4, 64, 64, 32),
    )
    flops = 1e6
    us = rates(setup()).operator_us(replace(attention, flops=flops, count=1))
    assert us == pytest.approx(flops / GFLOPS / 1e3, rel=0.01)


def test_collectives_are_read_between_sizes_and_more_ranks_than_cores_share_them() -> None:
    two = rates(setup(ranks=2))
    reduced = exchange(10**6, ranks=2)
    assert two.collective_us(reduced) == pytest.approx(1100)
    four = rates(setup(ranks=2), ranks_per_node=4)
    assert four.collective_us(exchange(10**6, ranks=4)) == pytest.approx(1100 * 0.75 / 0.5 * 2)
    assert four.log_error("step") > two.log_error("step")


def test_host_time_and_scale_are_found_from_whole_steps() -> None:
    """Steps made of 1.3 x operators + 12 us per dispatch give just these two numbers."""
    traces = [
        step(scale, dispatches) for scale, dispatches in ((1, 900), (8, 600), (40, 900), (90, 300))
    ]
    alone = [predict_step(t, rates(setup())).parts_ms["compute"] for t in traces]
    measured = [
        1.3 * a + 12e-3 * sum(t.dispatches.values()) for a, t in zip(alone, traces, strict=True)
    ]
    found = fitted(setup(), traces, [[ms] for ms in measured])
    assert found.scale == pytest.approx(1.3, rel=0.01)
    assert found.dispatch_us == pytest.approx(12, rel=0.01)
    assert found.log_error == 0.05  # never narrower: machines are not that constant
    whole = predict_step(traces[2], rates(found))
    assert whole.step_time_ms == pytest.approx(measured[2], rel=0.01)
    assert whole.low_ms < measured[2] < whole.high_ms


def test_on_a_gpu_steps_as_long_as_their_host_takes_say_nothing_of_the_rates() -> None:
    """Host and device work at once: 9 us per dispatch, 1.2 x operators, whichever is longer."""
    traces = [step(*size) for size in ((1, 4000), (2, 4000), (1, 9000), (400, 900), (900, 900))]
    alone = [predict_step(t, rates(setup())).parts_ms["compute"] for t in traces]
    host = [9e-3 * sum(t.dispatches.values()) for t in traces]
    measured = [max(1.2 * a, h) for a, h in zip(alone, host, strict=True)]
    assert sum(ms == h for ms, h in zip(measured, host, strict=True)) == 3
    found = fitted(setup(), traces, [[ms] for ms in measured], asynchronous=True)
    assert found.dispatch_us == pytest.approx(9, rel=0.01)
    assert found.scale == pytest.approx(1.2, rel=0.01)


def sharded(scale: int, size: int) -> StepTrace:
    operators = step(scale, 0).operators
    return trace_of(*operators, exchange(size, "all_reduce", ranks=2), dispatches=500, device="cpu")


def test_what_shards_exchange_takes_longer_within_a_step_than_alone() -> None:
    """An exchange that takes 1.6 times as long within a step is found from trainings that send much."""
    two = setup(ranks=2)
    sizes = ((1, 10**6), (8, 10**7), (40, 10**6), (90, 10**7), (20, 3 * 10**7))
    traces = [sharded(*size) for size in sizes]
    alone = [predict_step(t, rates(two)).parts_ms for t in traces]
    measured = [p["compute"] + 500 * 10e-3 + 1.6 * p["communication"] for p in alone]
    found = fitted(two, traces, [[ms] for ms in measured])
    assert found.sent_scale == pytest.approx(1.6, rel=0.01)
    assert predict_step(traces[1], rates(found)).step_time_ms == pytest.approx(
        measured[1], rel=0.01
    )


def width(of: RankSetup, trace: StepTrace) -> float:
    found = predict_step(trace, rates(of))
    return found.high_ms / found.low_ms


def test_the_interval_holds_errors_of_the_model_and_of_repetition_and_knows_how_few_they_are() -> (
    None
):
    traces = [step(scale, 500) for scale in (1, 4, 8, 20, 40, 60, 90, 120)]
    alone = [predict_step(t, rates(setup())).parts_ms["compute"] + 5 for t in traces]
    calm = fitted(setup(), traces, [[ms, ms] for ms in alone])
    # a training that takes 25 % more or less in its second turn, but no other mean
    restless = fitted(setup(), traces, [[ms * 1.25, ms / 1.25] for ms in alone])
    assert calm.log_error == 0.05
    assert restless.log_error == pytest.approx(0.22, abs=0.01)  # log(1.25), of a single repetition
    few = fitted(setup(), traces[:3], [[ms * 1.25, ms / 1.25] for ms in alone[:3]])
    assert few.log_error == pytest.approx(restless.log_error, rel=0.01)
    assert width(few, traces[2]) > 1.05 * width(restless, traces[2])


def test_the_error_of_the_model_is_that_of_trainings_that_it_was_not_fitted_to() -> None:
    """A training that the others miss by 40 % bends a fit of few trainings towards itself."""
    sizes = ((1, 900), (4, 800), (8, 600), (40, 900), (90, 300))
    traces = [step(*size) for size in sizes]
    alone = [predict_step(t, rates(setup())).parts_ms["compute"] + 5 for t in traces]
    measured = [*alone[:-1], 1.4 * alone[-1]]
    found = fitted(setup(), traces, [[ms] for ms in measured])
    fit = [predict_step(trace, rates(found)).step_time_ms for trace in traces]
    assert found.log_error > max(abs(log(a / b)) for a, b in zip(measured, fit, strict=True))


def test_the_interval_is_wider_for_a_step_longer_than_all_that_were_timed() -> None:
    timed = replace(setup(), step_ms=(5.0, 100.0))
    near, far = step(40, 500), step(4000, 500)
    assert predict_step(near, rates(timed)).step_time_ms < 100
    assert width(timed, far) > 1.1 * width(timed, near)


def calibration() -> Calibration:
    return Calibration(
        device="A CPU @ 2.5GHz", device_type="cpu", torch="2.13.0+cpu", date="2026-11-22", cores=2,
        setups=(setup(), setup(ranks=2)),
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_it_is_used_for_the_same_device_and_minor_version_of_torch(config: Path) -> None:
    path = calibration().save()
    assert path == path_for("A CPU @ 2.5GHz")
    assert path.is_relative_to(config)
    found, _ = load_calibration("A CPU @ 2.5GHz", "2.13.1+cpu")
    assert found is not None
    assert [s.ranks for s in found.setups] == [1, 2]
    assert rates(found.setups[1]).collective_us(exchange(10**6, ranks=2)) == pytest.approx(1100)


def test_another_torch_or_device_or_a_damaged_file_is_not_used_and_said(config: Path) -> None:
    path = calibration().save()
    found, why = load_calibration("A CPU @ 2.5GHz", "2.14.0")
    assert found is None
    assert "made with torch 2.13.0+cpu, this is 2.14.0" in why
    found, why = load_calibration("Another CPU", "2.13.0")
    assert found is None
    assert "doctor --calibrate" in why
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | {"device": "A CPU  @ 2.5GHz"}))
    assert "is of A CPU  @ 2.5GHz, not of" in load_calibration("A CPU @ 2.5GHz", "2.13.0")[1]
    path.write_text(json.dumps(tree | {"setups": []}))
    assert "No calibration of A CPU" in load_calibration("A CPU @ 2.5GHz", "2.13.0")[1]
    for text in ("{", json.dumps(tree | {"schema": 99}), json.dumps(tree | {"setups": [1]})):
        path.write_text(text)
        found, why = load_calibration("A CPU @ 2.5GHz", "2.13.0")
        assert found is None
        assert "is damaged" in why


def test_quick_rates_are_kept_for_an_hour_beside_the_times_of_operators(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration().save()
    kept_rates("A CPU @ 2.5GHz").keep_quick("host cpu 2x1", {"float32": 0.1})  # as a run does
    found = kept_calibration("A CPU @ 2.5GHz")
    assert found.quick_rates("host cpu 2x1") == {"float32": 0.1}
    assert found.quick_rates("host cpu 1x1") == {}
    assert [s.ranks for s in found.setups] == [1, 2]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert found.quick_rates("host cpu 2x1") == {}
    found.keep_quick("host cpu 1x1", {"float32": 0.2})
    assert [*kept_calibration("A CPU @ 2.5GHz").quick] == ["host cpu 1x1"]


def test_quick_rates_of_a_device_without_a_calibration_are_kept_too(config: Path) -> None:
    kept_calibration("Another CPU").keep_quick("host", {"float32": 0.1})
    assert kept_calibration("Another CPU").quick_rates("host") == {"float32": 0.1}
    assert load_calibration("Another CPU", "2.13.0")[0] is None


def test_rates_of_products_are_measured_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def run(*_: Any, **__: Any) -> SimpleNamespace:
        measured.append(1)
        return SimpleNamespace(stdout='{"float32": 80.0, "bfloat16": 0.3}')

    monkeypatch.setattr(calibration_module.subprocess, "run", run)
    assert matmul_rates("Cray-1") == {}
    rates = matmul_rates("Cray-1", measure=True)
    assert matmul_rates("Cray-1", measure=True) == rates == {"float32": 80.0, "bfloat16": 0.3}
    assert len(measured) == 1


def test_rates_of_products_follow_from_those_of_a_run(config: Path) -> None:
    kept_calibration("Cray-1").keep_quick("host cpu 2x4", {"float32": 0.4, "bfloat16": 0.8})
    assert matmul_rates("Cray-1") == {"float32": 100.0, "bfloat16": 200.0}
