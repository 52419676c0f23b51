"""Rates that this machine reaches while all ranks work: matrix products, memory copies and all-reduce."""

import math
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from vitsweep.spec.resources import FP8_CAPABILITY
from vitsweep.world import World, allow_tf32

CHUNKS = 5
"""The median over so many chunks of calls is kept, so that a short disturbance does not count."""
MIN_SECONDS = {"cpu": 0.05, "cuda": 1.0}
"""Device type -> least duration behind each figure: clocks of a GPU settle within a second."""
MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}
LONGEST_MATMUL_SECONDS = 1.0
"""Where one product would take longer, one of a quarter of the side is timed."""
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Larger than any cache, so that memory is what is measured."""
ALL_REDUCE_BYTES = 25 * 2**20
"""DDP's default bucket."""
FEWEST_CALLS = 3


def calibrate(world: World) -> dict[str, float]:
    """Measure the rates of one rank while all ranks work; every rank calls it.

    Returns:
        Matmul TFLOP/s by dtype (`float32`, `bfloat16`; on CUDA `float16`, `tf32` too, and `float8` where
        it has such units);
        `copy_gb_per_s`, bytes read and written by a copy within the device's memory, per second;
        `all_reduce_gb_per_s`, the bus bandwidth 2(n-1)/n x bytes / time, missing for one rank.
    """
    dtypes = (
        ("float32", "bfloat16")
        if world.device.type == "cpu"
        else ("float32", "bfloat16", "float16")
    )
    allow_tf32(False)
    result = {dtype: _matmul_tflops(getattr(torch, dtype), world) for dtype in dtypes}
    if world.device.type == "cuda":
        allow_tf32(True)
        result["tf32"] = _matmul_tflops(torch.float32, world)
        allow_tf32(False)
        if torch.cuda.get_device_capability(world.device) >= FP8_CAPABILITY:
            with suppress(RuntimeError, ValueError):  # AMD's units have another format
                result["float8"] = _matmul_tflops(torch.float8_e4m3fn, world)
    result["copy_gb_per_s"] = _copy_gb_per_s(world)
    if world.size > 1:
        result["all_reduce_gb_per_s"] = _all_reduce_gb_per_s(world)
    return result


def _matmul_tflops(dtype: torch.dtype, world: World) -> float:
    side = MATMUL_SIDE[world.device.type]
    small = _matmul(side // 4, dtype, world)
    _timed(small, 1, world)
    if 4**3 * _timed(small, 1, world) > LONGEST_MATMUL_SECONDS:  # a format that the CPU emulates
        return 2 * (side // 4) ** 3 / seconds_per_call(small, world) / 1e12
    return 2 * side**3 / seconds_per_call(_matmul(side, dtype, world), world) / 1e12


def _matmul(side: int, dtype: torch.dtype, world: World) -> Callable[[], object]:
    a, b = (torch.randn(side, side, device=world.device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:  # with a scale per operand, the second one by columns
        scale = torch.ones((), device=world.device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _copy_gb_per_s(world: World) -> float:
    size = COPY_BYTES[world.device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_call(lambda: target.copy_(source), world) / 1e9


def _all_reduce_gb_per_s(world: World) -> float:
    buffer = torch.zeros(ALL_REDUCE_BYTES // 4, device=world.device)
    seconds = seconds_per_call(lambda: dist.all_reduce(buffer), world)
    return 2 * (world.size - 1) / world.size * ALL_REDUCE_BYTES / seconds / 1e9


def seconds_per_call(work: Callable[[], object], world: World) -> float:
    """Return the time of one call, as the mean over calls that last at least `MIN_SECONDS`.

    All ranks make the same number of calls, which a few calls before give; these also pay for
    caches and workspaces. On CUDA, events in the stream are timed. On a CPU, which other programs
    share, the fastest of `CHUNKS` such means is taken.
    """
    _timed(work, 1, world)
    calls, least = FEWEST_CALLS, MIN_SECONDS[world.device.type]
    while (seconds := _timed(work, calls, world)) < least:
        calls = math.ceil(calls * min(100.0, 1.1 * least / max(seconds, 1e-9)))
    more = CHUNKS - 1 if world.device.type == "cpu" and seconds < LONGEST_MATMUL_SECONDS else 0
    return min(seconds, *(_timed(work, calls, world) for _ in range(more)), math.inf) / calls


def _timed(work: Callable[[], object], calls: int, world: World) -> float:
    """Return the seconds that some calls took on the slowest rank; all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
    else:
        started = time.perf_counter()
        for _ in range(calls):
            work()
        seconds = time.perf_counter() - started
    slowest = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
