"""The ruler before the object: matmul rate and all-reduce bandwidth of this machine, as it is."""

import time
from statistics import median

import torch
import torch.distributed as dist

from vitsweep.world import World

MATMUL_SIDE = {"cpu": 1024, "cuda": 8192}
ALL_REDUCE_BYTES = 25 * 2**20
"""DDP's default bucket."""
REPEATS = 5


def calibrate(world: World) -> dict[str, float]:
    """Return matmul TFLOP/s of one rank while all ranks work, by dtype, and all-reduce GB/s.

    The all-reduce figure is the bus bandwidth: 2(n-1)/n x bytes / time; it is missing for one rank.
    """
    dtypes = (
        ("float32", "bfloat16")
        if world.device.type == "cpu"
        else ("float32", "bfloat16", "float16")
    )
    result = {dtype: _matmul_tflops(getattr(torch, dtype), world) for dtype in dtypes}
    if world.device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        result["tf32"] = _matmul_tflops(torch.float32, world)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    if world.size > 1:
        result["all_reduce_gb_per_s"] = _all_reduce_gb_per_s(world)
    return result


def _matmul_tflops(dtype: torch.dtype, world: World) -> float:
    side = MATMUL_SIDE[world.device.type]
    a, b = (torch.randn(side, side, device=world.device).to(dtype) for _ in range(2))
    seconds = _median_seconds(lambda: torch.mm(a, b), world)
    return 2 * side**3 / seconds / 1e12


def _all_reduce_gb_per_s(world: World) -> float:
    buffer = torch.zeros(ALL_REDUCE_BYTES // 4, device=world.device)
    seconds = _median_seconds(lambda: dist.all_reduce(buffer), world)
    return 2 * (world.size - 1) / world.size * ALL_REDUCE_BYTES / seconds / 1e9


def _median_seconds(work: object, world: World) -> float:
    times = []
    for _ in range(REPEATS + 1):
        _wait(world)
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        _wait(world)
        times.append(time.perf_counter() - begin)
    return median(times[1:])  # the first pays for caches and workspaces


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
