"""Rates that a core of this machine reaches."""

import time

import torch

CHUNKS = 5
"""The fastest of so many chunks of calls is kept, so that a short disturbance does not count."""
SMALL_SIDE, SMALL_SECONDS = 256, 0.02


def matmul_gflops_per_core() -> dict[str, float]:
    """Return GFLOP/s of one CPU core by dtype, from one small product of each; it takes milliseconds.

    An emulated format is hundreds of times slower, which no flag of the processor tells for certain.
    """
    torch.set_num_threads(1)
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        a, b = (torch.randn(SMALL_SIDE, SMALL_SIDE).to(getattr(torch, dtype)) for _ in range(2))
        torch.mm(a, b)
        times: list[float] = []
        while sum(times) < SMALL_SECONDS:
            started = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - started)
        found[dtype] = 2e-9 * SMALL_SIDE**3 / min(times)  # what else runs here slows most calls
    return found
