"""What a record says of its machine and its kernels, from small inputs with one answer."""

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vitsweep.control_group import allowed_cores
from vitsweep.job_environment import boot_id
from vitsweep.measure import environment as measured
from vitsweep.measure.communication import _collective, _sent, transfers_ms, units_of
from vitsweep.measure.environment import (
    AttentionKernels,
    Compiled,
    DeviceMonitor,
    StopMonitor,
    _energy,
    busy_seconds,
    converted_layers,
    environment,
    host_allocator,
)


def test_the_columns_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    found = environment(torch.device("cpu"))
    assert (found["device_type"], found["node"], found["slurm_job_id"]) == ("cpu", "n7", "12")
    assert found["cuda"] is found["nccl"] is found["driver"] is None
    assert found["torch"] == torch.__version__
    assert found["host_cores"] == os.cpu_count()
    assert found["cores_allowed"] == allowed_cores()
    monkeypatch.delenv("SLURMD_NODENAME")
    assert environment(torch.device("cpu"))["node"] == found["host"]


def test_the_allocator_is_the_one_that_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    for maps, name in (
        ("/usr/lib/libc.so.6", "libc"),
        ("/usr/lib/libjemalloc.so.2\n/usr/lib/libc.so.6", "jemalloc"),
        ("/usr/lib/libtcmalloc_minimal.so.4", "tcmalloc"),
    ):
        monkeypatch.setattr(Path, "read_text", lambda path, maps=maps, **_: maps)
        assert host_allocator() == name
    monkeypatch.setattr(Path, "read_text", lambda path, **_: " id \n")
    assert boot_id() == "id"


def noted(*operations: tuple[str, tuple[Any, ...]]) -> str | None:
    kernels = AttentionKernels()
    for name, args in operations:
        schema = SimpleNamespace(name=f"aten::{name}")
        kernels._note(SimpleNamespace(_schema=schema), None, args, {})
    return kernels.name


def test_kernels_are_named_once_and_softmax_where_none_is_fused() -> None:
    scores, rows = torch.zeros(2, 3, 3), torch.zeros(3, 3)
    flash, efficient = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    )
    for operations, name in (
        ([], None),
        ([("mm", (rows, rows))], None),
        ([("_softmax", (rows, 1))], None),
        ([("_softmax", (scores, 2))], "math"),
        ([("_safe_softmax", (scores, 2))], "math"),
        ([("_softmax", ())], None),
        ([("_softmax", (3, 2))], None),
        (
            [(flash, ()), ("_softmax", (scores, 2)), (efficient, ()), (flash, ())],
            "flash, efficient",
        ),
    ):
        assert noted(*operations) == name
    kernels = AttentionKernels()
    kernels._note(SimpleNamespace(__name__="flex_attention"), None, (), {})
    assert kernels.name == "flex"


def test_what_was_compiled_is_read_from_torchs_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"aot_autograd": Counter(total=5), "inductor": Counter(cudagraph_skips=2)}
    spent = {"entire_frame_compile": 3e9, "entire_backward_compile": 5e8, "inductor_compile": 1e9}
    name = "torch._dynamo.utils"
    for module, found in (
        (SimpleNamespace(counters=counters, cumulative_time_spent_ns=spent), Compiled(5, 3.5, 2)),
        (SimpleNamespace(counters=counters, cumulative_time_spent_ns={}), Compiled(5, 0.0, 2)),
        (SimpleNamespace(), Compiled(None, None, None)),
        (None, Compiled(0, 0.0, 0)),
    ):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        assert Compiled.so_far() == found
    assert Compiled(7, 4.0, None).since(Compiled(5, 3.5, 2)) == Compiled(2, 0.5, None)


def test_layers_in_float8_are_counted_over_blocks() -> None:
    class Float8Linear(nn.Module):
        pass

    block = nn.ModuleDict({"up": Float8Linear(), "down": nn.Linear(1, 1)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, block]), "head": Float8Linear()})
    model["blocks"][1] = nn.ModuleDict({"up": Float8Linear()})
    assert converted_layers(model) == "2 x blocks.*.up, 1 x head"
    assert converted_layers(nn.Linear(1, 1)) is None


def test_energy_goes_on_to_the_window_as_between_the_samples() -> None:
    """20 J in 4 s are 5 W: 30 J in the 6 s since the window began."""
    assert _energy([12.0, 14.0, 16.0], [100.0, 110.0, 120.0], 10.0) == 30.0
    assert _energy([12.0, 16.0], [100.0, 120.0], 12.0) == 20.0
    assert _energy([12.0], [100.0], 10.0) is None
    assert _energy([12.0, 12.0], [100.0, 120.0], 10.0) is None
    assert _energy([12.0, 16.0], [None, 120.0], 10.0) is None
    assert _energy([12.0, 16.0], [100.0, None], 10.0) is None


def test_samples_before_the_window_do_not_count() -> None:
    monitor = DeviceMonitor(torch.device("cpu"))
    monitor._thread = threading.Thread()
    monitor._thread.start()
    monitor._sample = lambda: None  # type: ignore[method-assign]
    monitor._samples = [
        (1.0, 500.0, False, True, 0.0),
        (2.0, 1000.0, True, False, 10.0),
        (4.0, 2000.0, False, False, 30.0),
    ]
    found = monitor.end(2.0)
    assert (found.sm_clock_mhz, found.power_capped_share) == (1500.0, 0.5)
    assert (found.energy_j, found.throttled) == (20.0, False)
    assert monitor.end(1.0).throttled is True
    assert monitor.end(5.0).sm_clock_mhz is None


def test_stops_count_from_the_window_on() -> None:
    monitor = StopMonitor()
    monitor._end.set()
    monitor._thread.join()
    monitor._stops = [(1.0, 4.0), (6.0, 9.0), (12.0, 15.0)]
    assert [monitor.end(since) for since in (0.0, 3.0, 6.0, 8.0, 9.0, 15.0)] == [9, 7, 6, 4, 3, 0]


def test_a_thread_that_slept_too_long_without_cpu_time_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ticks of 0.25 s: late by 3.1 s with 1 % of CPU time, by 2.9 s, and by 4 s with 10 %."""
    walls, used = [0.0, 3.35, 6.5, 10.75], [0.0, 0.03, 0.06, 0.46]
    monitor = StopMonitor()
    monitor._end.set()
    monitor._thread.join()
    waits = iter([False, False, False, True])
    monkeypatch.setattr(monitor._end, "wait", lambda seconds: next(waits))
    walls_of, used_of = iter(walls), iter(used)
    clock = SimpleNamespace(perf_counter=lambda: next(walls_of), process_time=lambda: next(used_of))
    monkeypatch.setattr(measured, "time", clock)
    monitor._run()
    assert monitor._stops == [(pytest.approx(0.25), 3.35)]


def test_cores_are_busy_but_for_idling_and_waiting_for_disks() -> None:
    class Times(tuple[float, ...]):
        idle, iowait = 100.0, 5.0

    assert busy_seconds(Times((10.0, 2.0, 100.0, 5.0))) == 12.0

    class Other(tuple[float, ...]):
        idle = 100.0

    assert busy_seconds(Other((10.0, 2.0, 100.0))) == 12.0


def test_bytes_that_a_rank_sends_of_a_collective() -> None:
    sent = {"all_reduce": 150.0, "all_gather": 75.0, "reduce_scatter": 75.0, "all_to_all": 75.0}
    for name, number in (sent | {"broadcast": 75.0, "send": 100.0}).items():
        assert _sent(name, 4, 100) == number
        schema = SimpleNamespace(name=f"c10d::{name.replace('_', '')}_")
        assert _collective(SimpleNamespace(_schema=schema)) == name


def test_a_transfer_begins_with_its_last_rank_and_ends_at_the_median() -> None:
    first = [("gloo", 0.0, 5.0), ("gloo", 10.0, 6.0)]
    second = [("gloo", 2.0, 4.0), ("gloo", 13.0, 2.0)]
    third = [("gloo", 1.0, 4.0), ("gloo", 12.0, 4.0)]
    assert transfers_ms([first, second, third], ["a", "a", "a"]) == [3.0, 3.0]
    later = [("gloo", 101.0, 3.5), ("gloo", 112.0, 4.0)]  # of a clock that is 99.75 ms ahead
    assert transfers_ms([first, first, later], ["a", "a", "b"]) == [3.75, 3.75]
    assert transfers_ms([[], []], ["a", "b"]) == []
    assert transfers_ms([first, second[:1]], ["a", "a"]) is None


def test_units_are_blocks_and_what_lies_outside_of_them() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(nn.Linear(1, 1)))
    model.add_module("head", nn.Linear(1, 1))
    assert list(units_of(model)) == ["stem", "head"]
