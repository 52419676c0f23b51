"""The time of a step from its trace: rooflines, collectives, overlap, launch, bubble, interval."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.extras.predict.traces import exchange, moved, product, trace_of
from vitsweep.extras.predict.measured_rates import IN_STEPS, MeasuredRates
from vitsweep.extras.predict.profile_rates import OVERHEAD, TableRates
from vitsweep.extras.predict.step_time import FRESH, fresh_bytes, predict_step, student_80
from vitsweep.rates.profile import generic_gpu, profile_named

H100 = TableRates(profile_named("h100"), overhead=1.0)


def test_a_large_product_takes_its_flops_over_the_sustained_rate() -> None:
    big = product(8192, 8192, 8192)
    expected_us = big.flops / (989.5e6 * 0.803 * 0.9)
    assert H100.operator_us(big) == pytest.approx(expected_us, rel=0.1)


def test_a_block_more_than_a_wave_costs_another_wave() -> None:
    full = H100.operator_us(product(128 * 132, 128, 4096))
    one_more = H100.operator_us(product(128 * 132 + 1, 128, 4096))
    assert full < one_more < 2.1 * full


def test_few_blocks_with_a_long_inner_dimension_are_split() -> None:
    """The gradient of a weight has few blocks: without a split most multiprocessors would wait."""
    by_weight = product(768, 768, 12608)
    assert by_weight.flops / H100.operator_us(by_weight) > 0.35 * 989.5e6 * 0.803 * 0.9


def test_memory_bound_work_takes_its_bytes_over_the_reachable_bandwidth() -> None:
    assert H100.operator_us(moved(10**9)) == pytest.approx(1e9 / (0.8 * 3.35e6), rel=0.01)
    assert H100.operator_us(moved(600)) == H100.hardware["kernel_us"]


def test_all_reduce_and_all_gather_have_bandwidths_of_their_own() -> None:
    size = 2**30
    reduce_us = H100.collective_us(exchange(size))
    gather_us = H100.collective_us(exchange(size, "all_gather"))
    assert reduce_us == pytest.approx(1.75 * size / 463.6e3, rel=0.01)
    assert gather_us / reduce_us == pytest.approx(1 / 2 / 0.753, rel=0.01)


def test_a_collective_is_as_long_as_what_its_links_carry() -> None:
    """`bus` reads the curve of the profile; the rest is computed by hand."""
    hw, size = H100.hardware, 2**30
    bus = H100._curves["all_reduce_gb_s"](size) * 1e3
    others = bus * hw["gather_over_reduce"]
    wire = hw["fabric_fraction"] * hw["nic_gb_s"] * 1e3
    latency = hw["fabric_pass_us"]
    for name, ranks, nodes, expected in (
        ("all_reduce", 1, 1, 0.0),
        ("all_reduce", 2, 1, 2 * size / 2 / others),
        ("all_reduce", 4, 1, 2 * 3 * size / 4 / others),
        ("all_reduce", 5, 1, 2 * 4 * size / 5 / bus),
        ("all_gather", 8, 1, 7 * size / 8 / others),
        ("reduce_scatter", 2, 1, size / 2 / others),
        ("all_gather", 2, 2, latency + size / 2 / wire),
        ("all_reduce", 4, 4, 2 * (2 * latency + 3 * size / 4 / wire)),
        ("send", 2, 1, 2 * hw["kernel_us"] + size / (0.8 * hw["link_gb_s"] * 1e3)),
        ("send", 2, 2, latency / 2 + size / wire),
    ):
        found = H100.collective_us(exchange(size, name, ranks=ranks, nodes=nodes))
        assert found == pytest.approx(expected), (name, ranks, nodes)
    inside, between = 3 * size / 4 / others, latency + size / 2 / 4 / wire
    both = H100.collective_us(exchange(size, "all_gather", ranks=8, nodes=2))
    assert both == pytest.approx(max(inside, between) + min(inside, between) / 3)
    assert H100.operator_us(replace(moved(600), count=0)) == 0.0


def test_the_published_table_over_four_nodes_is_met() -> None:
    """4 x 8 B200 over 400 Gb/s: bus bandwidth of 64 GB/s at 16 MiB, 362 at 1 GiB (ml-engineering)."""
    b200 = TableRates(profile_named("b200"))
    for size, bus_gb_s in ((2**24, 64.43), (2**27, 197.94), (2**30, 361.99)):
        us = b200.collective_us(exchange(size, ranks=32, nodes=4))
        assert us == pytest.approx(2 * 31 / 32 * size / bus_gb_s / 1e3, rel=0.35)


def test_gradients_hide_behind_the_backward_pass_and_slow_it_down() -> None:
    compute = product(8192, 8192, 8192, phase="backward", count=20)
    sent = exchange(25 * 2**20, count=10)
    alone = predict_step(trace_of(compute), H100)
    both = predict_step(trace_of(compute, sent), H100)
    one_bucket_ms = H100.collective_us(sent) / 1e3
    assert both.parts_ms["communication"] == pytest.approx(one_bucket_ms)
    charge = 9 * one_bucket_ms * 0.15
    assert both.parts_ms["compute"] - alone.parts_ms["compute"] == pytest.approx(charge)


def test_activations_are_waited_for() -> None:
    sent = exchange(25 * 2**20, count=10, purpose="activation")
    compute = product(8192, 8192, 8192, phase="backward", count=20)
    found = predict_step(trace_of(compute, sent), H100)
    assert found.parts_ms["communication"] == pytest.approx(10 * H100.collective_us(sent) / 1e3)


def test_an_eager_step_lasts_as_long_as_its_dispatches_and_a_compiled_one_does_not() -> None:
    small = product(64, 64, 64, count=100)
    eager = predict_step(trace_of(small, dispatches=2000), H100)
    assert eager.step_time_ms == pytest.approx(2000 * H100.dispatch_us / 1e3)
    assert eager.regime == "launch"
    compiled = predict_step(trace_of(small, dispatches=2000, compiled="model"), H100)
    assert compiled.step_time_ms == pytest.approx(0.26 * eager.step_time_ms)
    large = product(8192, 8192, 8192, count=100)
    unchanged = predict_step(trace_of(large, dispatches=2000, compiled="model"), H100)
    assert unchanged.step_time_ms == predict_step(trace_of(large), H100).step_time_ms


def test_a_pipeline_adds_its_bubble() -> None:
    trace = trace_of(product(8192, 8192, 8192, count=8), pipeline_ranks=4, pipeline_chunks=8)
    found = predict_step(trace, H100)
    assert found.parts_ms["bubble"] == pytest.approx(found.parts_ms["compute"] * 3 / 8)


def test_a_slow_loader_is_waited_for_beyond_the_step() -> None:
    trace = trace_of(product(8192, 8192, 8192))
    step = predict_step(trace, H100).step_time_ms
    slow = predict_step(trace, H100, input_ms=step + 5)
    assert slow.step_time_ms == pytest.approx(step + 5)
    assert predict_step(trace, H100, input_ms=step / 2).parts_ms["data"] == 0


def test_the_interval_is_wider_where_less_is_known() -> None:
    trace = trace_of(product(8192, 8192, 8192))

    def width(name: str) -> float:
        found = predict_step(trace, TableRates(profile_named(name)))
        assert found.low_ms < found.step_time_ms < found.high_ms
        return found.high_ms / found.low_ms

    assert width("v100") > width("h100") > 1 + student_80(math.inf) * 0.2
    notes = predict_step(trace, TableRates(profile_named("v100"))).notes
    assert any("no source" in note for note in notes)
    assert any(re.search("bfloat16.*float32", note) for note in notes)
    assert "`--hardware`" in predict_step(trace, TableRates(generic_gpu())).notes[-1]


def test_the_interval_is_wider_where_the_share_of_a_peak_is_that_of_another_format() -> None:
    """ViT-B/16 under TF32 took 1.39 to 1.50 times as long as predicted on an H200."""
    products = [replace(product(8192, 8192, 8192), dtype=d) for d in ("bfloat16", "float32")]
    half, tf32 = (predict_step(trace_of(p), H100, tf32=True) for p in products)
    assert half.high_ms / half.step_time_ms < 1.4 < 1.5 < tf32.high_ms / tf32.step_time_ms
    assert not any("no source" in note for note in half.notes)
    assert any("no source" in note and "tf32" in note for note in tf32.notes)


def test_whole_steps_take_longer_than_their_parts() -> None:
    trace = trace_of(product(8192, 8192, 8192, count=10))
    whole = predict_step(trace, TableRates(profile_named("h100")))
    assert whole.step_time_ms == pytest.approx(OVERHEAD * predict_step(trace, H100).step_time_ms)


def test_parts_sum_up_to_the_step() -> None:
    trace = trace_of(
        product(512, 512, 512), moved(10**7, phase="optimizer"), exchange(10**6), dispatches=50
    )
    found = predict_step(trace, H100, input_ms=1)
    assert sum(found.parts_ms.values()) == pytest.approx(found.step_time_ms)


def test_a_format_without_units_of_its_own_is_computed_in_float32() -> None:
    rates = TableRates(profile_named("v100"))
    times = {
        dtype: rates.operator_us(replace(product(4096, 4096, 4096), dtype=dtype))
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert times["bfloat16"] > 4 * times["float16"]
    assert times["float32"] == pytest.approx(times["bfloat16"], rel=0.3)


def test_memory_that_the_system_provides_anew_in_each_step_takes_its_time() -> None:
    """On a CPU: half of what a step frees beyond twice its largest tensor, at the measured rate."""
    pages = {
        "kind": "memory",
        "name": FRESH,
        "dtype": "float32",
        "shape": [10**6],
        "backward": False,
    }
    row = pages | {"bytes_moved": 4 * 10**6, "us": 4000.0}
    times = {"operators": [row, row | {"name": "add"}], "collectives": []}
    rates = MeasuredRates(times, timed=(1, 1), used=(1, 1), cores=2, device="a processor")
    alive = {
        "forward end": {"activations": 20_000_000, "parameters": 10**9},
        "backward start": {"activations": 22_000_000},
        "optimizer start": {"activations": 1_000_000},
    }
    largest = replace(moved(8_000_000, count=0), dtype="float32", shape=(10**6,))
    step = trace_of(largest, device="cpu", dispatches=0, peaks=alive)
    assert fresh_bytes(step) == (22_000_000 - 2 * 4_000_000) / 2
    assert predict_step(step, rates).step_time_ms == pytest.approx(7.0 * IN_STEPS)
    assert fresh_bytes(replace(step, device="cuda")) == 0


def test_one_measured_number_format_stands_for_the_others(tmp_path: Path) -> None:
    path = tmp_path / "half.yaml"
    path.write_text(
        "{peak_tflops: {float32: 10, float16: 80}, figures: {memory_gib: {value: 80, %s}, "
        "memory_tb_s: {value: 2, %s}, matmul_fraction: {value: {float16: 0.8}, %s}}}".replace(
            "%s", "source: me, confidence: measured"
        ),
        encoding="utf-8",
    )
    half = TableRates(profile_named(str(path)))
    assert half._matmul_fraction("float32") == half._matmul_fraction("bfloat16") == 0.8
