"""How fast a core of this machine multiplies in each format; run in a process of its own."""

import json
import time

import torch

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


if __name__ == "__main__":
    print(json.dumps(matmul_gflops_per_core()))
