"""A profiler trace of one step, for reading in a browser (chrome://tracing, Perfetto)."""

from collections.abc import Callable
from pathlib import Path

from vitsweep.measure.profiling import quiet_profile
from vitsweep.world import World


def traced(step: Callable[[], object], folder: Path, world: World) -> Path | None:
    """Run `step` on every rank under the profiler; rank 0 writes `trace.json.gz`."""
    from torch.profiler import ProfilerActivity

    on_gpu = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with quiet_profile(activities) as profiled:
        step()
    if world.rank:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace.json.gz"
    profiled.export_chrome_trace(str(path))
    return path
