"""Samples of two ranks by hand, and the row they must give."""

from dataclasses import replace
from typing import Any

import pytest

from tests.cells import cell
from vitsweep.errors import VitsweepError
from vitsweep.measure.communication import SentBytes
from vitsweep.measure.environment import DeviceState
from vitsweep.measure.summarize import RankSamples, gradient_tolerance, summarize
from vitsweep.results.metrics import METRICS
from vitsweep.spec.cell_spec import CellSpec, flatten


def spec(warmup: int = 2, measured: int = 4) -> CellSpec:
    plain = cell("measurement=smoke", "batch.images_per_step=16")
    window = replace(plain.measurement, warmup_steps=warmup, measured_steps=measured)
    return replace(plain, measurement=window)


def samples(times: list[float], **given: Any) -> RankSamples:
    known: dict[str, Any] = {
        "data_waits_ms": [1.0] * len(times),
        "warmup_steps": 2,
        "warmup_steps_added": 0,
        "cut_short": False,
        "losses": [2.0] * len(times),
        "skipped": [False] * len(times),
        "phases_ms": {"data": 1.0, "forward": 2.0, "backward": 3.0, "optimizer": 4.0},
        "collectives": [("gloo:all_reduce", 102.0, 5.0)],
        "device_state": DeviceState(),
        "setup_seconds": 3.0,
        "sent": SentBytes(
            by_purpose={"parameter": 0.0, "gradient": 100.0, "activation": 0.0},
            by_collective={"all_reduce/gradient": {"calls": 1.0, "bytes": 100.0}},
        ),
        "memory": {"peak_allocated_gib": None, "peak_rss_gib": 0.5},
        "own_cpu_seconds": 1.0,
        "environment": {"device": "AMD EPYC", "node": "a", "host": "a", "host_cores": 64},
        "compiled_graphs": 0,
        "compile_seconds": 0.0,
        "memory_reason": "",
        "machine": "one",
    }
    return RankSamples(step_times_ms=times, **(known | given))


TIMES = [900.0, 500.0, 12.0, 14.0, 10.0, 16.0]


def test_throughput_is_images_over_the_elapsed_time_of_the_slowest_rank() -> None:
    other = [1.0, 1.0, 11.0, 11.0, 11.0, 23.0]
    found = summarize(spec(), [samples(TIMES), samples(other)])
    # 52 ms on the first rank, 56 ms on the second, for 4 steps of 16 images
    assert found.metrics["step_time_ms"] == 14.0
    assert found.metrics["images_per_second"] == pytest.approx(4 * 16 / 0.056)
    assert found.metrics["images_per_second_per_rank"] == pytest.approx(4 * 8 / 0.056)
    assert found.validity["steps_counted"] == 4
    assert found.validity["warmup_steps_added"] == 0
    assert found.samples["step_time_ms"] == [TIMES, other]
    assert found.samples["warm_up_steps"] == 2


def test_skipped_steps_are_counted_and_left_out_of_the_window() -> None:
    skipped = [False, True, False, True, False, False]
    ranks = [samples(TIMES, skipped=skipped) for _ in range(2)]
    found = summarize(spec(), ranks)
    assert found.metrics["step_time_ms"] == pytest.approx((12 + 10 + 16) / 3)
    assert found.validity["steps_skipped"] == 2
    assert found.validity["steps_counted"] == 3
    assert found.samples["skipped"] == skipped


def test_a_run_of_skipped_steps_has_no_speed_and_no_utilisation() -> None:
    ranks = [samples(TIMES, skipped=[True] * 6) for _ in range(2)]
    found = summarize(spec(), ranks)
    assert found.validity["steps_counted"] == 0
    assert "images_per_second" not in found.metrics
    assert not found.validity["drifting"]


def test_phases_are_those_of_the_slowest_rank_and_bytes_the_mean() -> None:
    slow = samples(
        TIMES,
        phases_ms={"data": 9.0, "forward": 1.0, "backward": 3.5, "optimizer": 4.0},
        collectives=[("gloo:all_reduce", 100.0, 7.0)],
        sent=SentBytes(by_purpose={"parameter": 10.0, "gradient": 300.0, "activation": 0.0}),
    )
    found = summarize(spec(), [samples(TIMES), slow]).metrics
    assert (found["data_ms"], found["forward_ms"]) == (9.0, 1.0), "not 2.0, of the other rank"
    assert (found["backward_ms"], found["optimizer_ms"]) == (3.5, 4.0)
    assert found["communication_ms"] == 5.0, "the rank that came last did not wait"
    assert found["gradient_bytes_per_step"] == 200.0
    assert found["parameter_bytes_per_step"] == 5.0


def test_memory_is_the_worst_ranks_and_empty_where_it_does_not_apply() -> None:
    big = samples(TIMES, memory={"peak_allocated_gib": None, "peak_rss_gib": 1.5})
    found = summarize(spec(), [samples(TIMES), big]).metrics
    assert found["peak_rss_gib"] == 1.5
    assert found["peak_allocated_gib"] is None


def test_losses_are_means_over_ranks_of_a_fixed_step() -> None:
    one = samples(TIMES, losses=[9.0, 8.0, 3.0, 2.0, 2.0, 1.0])
    two = samples(TIMES, losses=[9.0, 8.0, 5.0, 2.0, 2.0, 2.0])
    found = summarize(spec(), [one, two]).metrics
    assert found["loss_last"] == 1.5
    more_steps = [samples([*TIMES, 10.0], losses=[*rank.losses, 0.5]) for rank in (one, two)]
    longer = summarize(spec(), more_steps).metrics
    assert longer["loss_last"] == 1.5, "of the same step, however many seconds were measured"


def test_a_slow_start_within_the_window_counts_and_is_called_drifting() -> None:
    times = [900.0, 500.0, *[300.0 - 10 * step for step in range(18)]]
    found = summarize(spec(measured=18), [samples(times)] * 2)
    assert found.samples["warm_up_steps"] == 2
    assert found.validity["steps_counted"] == 18
    assert found.metrics["step_time_ms"] == pytest.approx(sum(times[2:]) / 18)
    assert found.validity["drifting"]


def test_stalls_count_wherever_the_window_begins() -> None:
    """A loader that stalls at every tenth step: no phase of it may make the window faster."""
    for begin in range(10):
        steps = [305.0 if (begin + step) % 10 == 0 else 80.0 for step in range(20)]
        found = summarize(spec(measured=20), [samples([900.0, 80.0, *steps])])
        assert found.metrics["step_time_ms"] == pytest.approx(102.5)


def test_steps_that_grow_are_called_drifting() -> None:
    growing = [100.0 + 5 * step for step in range(20)]
    steady = [100.0, 101.0] * 10
    assert summarize(spec(measured=18), [samples(growing)] * 2).validity["drifting"]
    assert not summarize(spec(measured=18), [samples(steady)] * 2).validity["drifting"]


def test_energy_and_throttling_are_of_all_ranks_devices() -> None:
    cool = DeviceState(sm_clock_mhz=1900.0, power_capped_share=0.5, energy_j=40.0, throttled=False)
    hot = DeviceState(sm_clock_mhz=1500.0, power_capped_share=1.0, energy_j=30.0, throttled=True)
    found = summarize(spec(), [samples(TIMES, device_state=s) for s in (cool, hot)])
    assert found.metrics["window_energy_j"] == 70.0
    assert found.validity["throttled"] is True
    assert (found.environment["sm_clock_mhz"], found.environment["power_capped_share"]) == (
        1900,
        0.5,
    )
    unknown = summarize(spec(), [samples(TIMES)] * 2)
    assert unknown.metrics["window_energy_j"] is None
    assert unknown.validity["throttled"] is None
    assert "sm_clock_mhz" not in unknown.environment


def test_ranks_on_different_devices_are_no_measurement() -> None:
    other = {"device": "Intel Xeon", "node": "b", "host": "b", "host_cores": 64}
    with pytest.raises(VitsweepError, match="1 on `AMD EPYC`, 1 on `Intel Xeon`"):
        summarize(spec(), [samples(TIMES), samples(TIMES, environment=other)])


def test_nodes_are_named_once() -> None:
    where = {"device": "AMD EPYC", "node": "b", "host": "b", "host_cores": 64}
    ranks = [
        samples(TIMES),
        samples(TIMES),
        samples(TIMES, environment=where),
    ]
    found = summarize(spec(), ranks)
    assert found.environment["nodes_used"] == "a,b"


def test_more_threads_than_cores_on_a_host_are_oversubscribed() -> None:
    def on_host(cores: int) -> dict[str, Any]:
        return {"device": "AMD EPYC", "node": "a", "host": "a", "host_cores": cores}

    threads = 2 * cell().resources.threads_per_rank
    for cores, crowded in ((threads, False), (threads - 1, True)):
        ranks = [samples(TIMES, environment=on_host(cores)) for _ in range(2)]
        assert summarize(spec(), ranks).validity["oversubscribed"] is crowded


@pytest.mark.parametrize(("machines", "crowded"), [("one", True), ("another", False)])
def test_several_nodes_of_one_machine_are_oversubscribed(machines: str, crowded: bool) -> None:
    second = {"device": "AMD EPYC", "node": "b", "host": "a", "host_cores": 64}
    ranks = [samples(TIMES), samples(TIMES, environment=second, machine=machines)]
    assert summarize(spec(), ranks).validity["oversubscribed"] is crowded


def test_every_number_of_a_run_is_defined_and_is_no_column_of_the_spec() -> None:
    metrics = summarize(spec(), [samples(TIMES)] * 2).metrics
    assert set(metrics) <= METRICS.keys()
    assert not metrics.keys() & flatten(spec()).keys()


def test_gradients_may_differ_by_the_root_of_the_rounding_for_one_reason_and_freely_for_two() -> (
    None
):
    class OverBatch:
        norms_over_batch = True

    exact, rounded = cell("precision=fp32"), cell("precision=bf16")
    loss, coarse = (c.precision.relative_tolerance() for c in (exact, rounded))
    assert loss <= 1e-4 < coarse
    assert gradient_tolerance(exact) == loss
    assert gradient_tolerance(rounded) == coarse**0.5
    assert gradient_tolerance(replace(exact, model=OverBatch())) == loss**0.5  # type: ignore[arg-type]
    assert gradient_tolerance(replace(rounded, model=OverBatch())) is None  # type: ignore[arg-type]
    assert gradient_tolerance(cell("precision=fp8", "precision.emulate=true")) is None


def test_losses_of_the_first_steps_end_with_a_skipped_update_and_the_last_is_of_a_fixed_step() -> (
    None
):
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]

    def found(
        skipped: int | None, given: list[float], least: int = 3, warmup: int = 2
    ) -> list[Any]:
        flags = [step == skipped for step in range(len(given))]
        ranks = [samples(TIMES[: len(given)], losses=given, skipped=flags)] * 2
        asked = spec(warmup, least)
        window = replace(asked.measurement, min_seconds=0.0)
        columns = summarize(replace(asked, measurement=window), ranks).metrics
        return [columns[key] for key in ("loss_step_1", "loss_step_2", "loss_step_3", "loss_last")]

    assert found(None, losses) == [9.0, 8.0, 7.0, 5.0]
    assert found(0, losses) == [9.0, None, None, 5.0]
    assert found(1, losses) == [9.0, 8.0, None, 5.0]
    assert found(2, losses) == [9.0, 8.0, 7.0, 5.0]
    assert found(None, losses[:2]) == [9.0, 8.0, None, 8.0]
    assert found(None, losses[:4]) == [9.0, 8.0, 7.0, 6.0]
    assert found(None, losses, warmup=0) == [9.0, 8.0, 7.0, 7.0]


def test_weights_count_as_unmoved_over_all_ranks_that_gave_them_a_gradient() -> None:
    def found(*ranks: dict[str, list[float]]) -> tuple[Any, ...]:
        made = summarize(spec(), [samples(TIMES, unmoved_weights=rank) for rank in ranks])
        shares = made.metrics["unmoved_tensor_share"], made.metrics["unmoved_weight_share"]
        return (*shares, made.validity["unmoved_weights"])

    assert found({}, {}) == (None, None, None)
    assert found({"a": [0.0, 0.0]}) == (None, None, None)
    halves = {"a": [60.0, 60.0], "b": [40.0, 0.0]}, {"a": [40.0, 30.0], "b": [60.0, 10.0]}
    assert found(*halves) == (0.0, 0.5, True)
    assert found({"a": [50.0, 50.0], "b": [150.0, 0.0], "c": [0.0, 0.0]}) == (0.5, 0.25, True)
    assert found({"a": [1000.0, 10.0]}) == (0.0, 0.01, False)
    assert found({"a": [1000.0, 11.0]}) == (0.0, 0.011, True)
    many = {f"{i}": [1000.0, 0.0] for i in range(99)}
    assert found(many | {"a": [1.0, 1.0]}) == (0.01, 1 / 99001, False)
    assert found({"a": [1.0, 1.0], "b": [9999.0, 0.0]})[2] is True


def test_what_ranks_do_not_know_is_unknown_of_the_run() -> None:
    """Bytes and compilations, throttling and energy: of all ranks, of any, or of the largest."""
    first = samples(TIMES, compile_seconds=3.0, compiled_graphs=4, setup_seconds=1.0)
    for seconds, graphs, largest in ((5.0, 1, 5.0), (2.0, 9, 3.0), (None, 1, None)):
        other = samples(TIMES, compile_seconds=seconds, compiled_graphs=graphs, setup_seconds=2.5)
        found = summarize(spec(), [first, other]).metrics
        assert (found["compile_seconds"], found["compiled_graphs"]) == (largest, 4)
        assert found["setup_seconds"] == 2.5
    for flags, expected in (([None, None], None), ([None, False], False), ([True, None], True)):
        states = [DeviceState(throttled=flag, energy_j=flag and 7.0) for flag in flags]
        made = summarize(spec(), [samples(TIMES, device_state=state) for state in states])
        assert made.validity["throttled"] is expected
        assert made.metrics["window_energy_j"] is None
    window_s = sum(TIMES[2:]) / 1e3
    for shares, expected in (((None, None), None), ((None, 0.009), False), ((0.0, 0.011), True)):
        held = [share and share * window_s for share in shares]
        made = summarize(spec(), [samples(TIMES, throttled_seconds=seconds) for seconds in held])
        assert made.validity["quota_throttled"] is expected
    purposes = ({"unattributed": 0.0}, {"unattributed": 5.0}, {})
    for of_ranks, expected in (((0, 0), False), ((0, 1), True), ((2, 2), None), ((2, 0), False)):
        sent = [SentBytes(by_purpose=purposes[i], reason=f"r{i}" * (i == 2)) for i in of_ranks]
        made = summarize(spec(), [samples(TIMES, sent=each) for each in sent])
        assert made.validity["unattributed_bytes"] is expected
        assert made.environment["sent_bytes_reason"] == ("r2" if of_ranks[0] == 2 else None)
        assert made.metrics["gradient_bytes_per_step"] is None
    of_one = summarize(spec(), [samples(TIMES, sent=SentBytes(by_purpose={"gradient": 8.0})),
                                samples(TIMES, sent=SentBytes())]).metrics  # fmt: skip
    assert of_one["gradient_bytes_per_step"] == 8.0, "the mean over ranks that know it"
    without = [samples(TIMES, collectives=None)] * 2
    assert summarize(spec(), without).metrics["communication_ms"] is None


def test_samples_keep_four_digits_and_the_facts_of_the_first_rank() -> None:
    given = samples(
        [1.23456, 2.0, 3.0], data_waits_ms=[0.12345, 1.0, 2.0], losses=[1.0] * 3, skipped=[False] * 3,
        warmup_steps_added=2, cut_short=True, first_gradients=[1.5, 2.0], memory_reason="none",
    )  # fmt: skip
    found = summarize(spec(), [given])
    assert found.samples["step_time_ms"] == [[1.2346, 2.0, 3.0]]
    assert found.samples["data_wait_ms"] == [[0.1235, 1.0, 2.0]]
    assert found.samples["collectives"] == given.sent.by_collective
    assert found.validity["first_gradients"] == "1.5 2.0"
    assert found.validity["short_window"] is True
    assert found.validity["warmup_steps_added"] == 2
    assert found.environment["activation_gib_reason"] == "none"
    assert summarize(spec(), [samples(TIMES)]).validity["first_gradients"] is None


def test_instruments_add_to_what_was_timed() -> None:
    timed = samples(TIMES, phases_ms={}, collectives=None)
    found = timed.with_instruments(
        {"phases_ms": {"data": 1.0}, "memory": {"activation_gib": 2.0}, "environment": {"kernel": "k"},
         "collectives": [["gloo", 1.0, 2.0]], "sent": {"reason": "r"}}
    )  # fmt: skip
    assert found.phases_ms == {"data": 1.0}
    assert found.memory == timed.memory | {"activation_gib": 2.0}
    assert found.environment == timed.environment | {"kernel": "k"}
    assert found.collectives == [("gloo", 1.0, 2.0)]
    assert found.sent == SentBytes(reason="r")
    assert found.device_state == timed.device_state
