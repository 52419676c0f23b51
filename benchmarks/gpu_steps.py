"""Training steps of vitsweep's cells in one process of `gpu.py`, and how they are timed.

Starting a process per run, as sweeps do, takes 10 s on a GPU; in eight minutes that is most of it.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_list import DEVICE_LOST

from vitsweep.composition.composer import Composer
from vitsweep.execution.outcome import classify
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine
from vitsweep.training.timed_steps import StepClock, garbage_collector_off
from vitsweep.world import World

Step = Callable[[], Any]
Figures = dict[str, Any]
NO_TIME = "no time was left"
ENDED = "failed: the process ended here"
"""Result of what has begun, until it has another one."""


@dataclass(frozen=True)
class Size:
    """What is trained; small where it only has to run.

    Attributes:
        device: `cuda`, or `cpu` for a smoke test.
        model: a choice of `conf/model`.
        resolution_px: side of an image.
        extra: overrides that make the model smaller.
        seconds: of timed steps of a contender in each turn.
    """

    device: str
    model: str = "vit_large"
    resolution_px: int = 224
    extra: tuple[str, ...] = ()
    seconds: float = 2.0

    @property
    def steps(self) -> int:
        """Steps of a warm-up, and between two readings of the clock, which empty the queue of a GPU."""
        return 3 if self.seconds else 1


NARROW = ("model.depth=2", "model.width=64", "model.num_heads=1", "model.mlp_width=256")
SMOKE = Size("cpu", "vit_tiny", 32, NARROW, 0.0)
"""Even where bfloat16 is emulated, a step of it takes milliseconds."""


@dataclass
class Run:
    """One part's process.

    Attributes:
        size: what is trained.
        path: of the part's figures.
        deadline: of `time.monotonic`; nothing is begun after it.
        earlier: figures of a process of this part that a fault ended.
    """

    size: Size
    path: Path
    deadline: float
    earlier: Figures = field(default_factory=dict)

    def write(self, figures: Figures) -> None:
        """Keep all that there is so far; at any moment the file is whole."""
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(figures, indent=1) + "\n")
        draft.replace(self.path)

    @property
    def is_late(self) -> bool:
        """Whether nothing more may be begun."""
        return time.monotonic() > self.deadline

    def figures_of(self, part: str) -> Figures:
        """Return what an earlier part has found."""
        path = self.path.with_name(f"{part}.json")
        return dict(json.loads(path.read_text())) if path.exists() else {}


def end_if_lost(size: Size) -> None:
    """End this process if a fault (an illegal access, say) has made its GPU refuse all that follows.

    Another process goes on after what has a result by now.
    """
    if size.device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"The GPU refuses all that follows: {error}", file=sys.stderr, flush=True)
        os._exit(DEVICE_LOST)


@cache
def _composer() -> Composer:
    return Composer()


def cell_of(size: Size, *overrides: str, images: int) -> CellSpec:
    """Return the checked cell of one rank on the device; it is never inferred.

    Raises:
        SystemExit: it cannot run; the text says why.
    """
    gpus = torch.cuda.device_count() if size.device == "cuda" else 0
    machine = Machine(device=size.device, cores_per_node=8, devices_per_node=gpus)  # type: ignore[arg-type]
    placed = ["resources.ranks_per_node=1", f"resources.device={size.device}"]
    shape = [f"batch.images_per_step={images}", f"batch.resolution_px={size.resolution_px}"]
    chosen = {override.partition("=")[0] for override in overrides}
    base = [f"model={size.model}", "data=synthetic", "sharding=none"]
    base = [each for each in base if each.partition("=")[0] not in chosen] + [*size.extra]
    planned = plan_cell(_composer().compose([*base, *placed, *shape, *overrides]), machine)
    if planned.reasons:
        raise SystemExit(" ".join(planned.reasons))
    return planned.spec


def our_step(cell: CellSpec, world: World | None = None) -> Step:
    """Build a cell as a run does; its step trains on one fixed batch that is on the device."""
    device = torch.device(cell.resources.device)
    if world is None:
        world = World(rank=0, local_rank=0, size=1, device=device, shape=cell.mesh, mesh=None)
    torch.manual_seed(cell.seed)
    with torch.device("meta"):
        model = build_model(cell)
    trainer = parallelize(model, cell, world)
    shape = (cell.micro_batch, *cell.model.input_shape(cell.batch.resolution_px))
    images = torch.randn(shape, device=device)
    labels = torch.randint(cell.model.num_classes, (cell.micro_batch,), device=device)
    micro_batches = [(images, labels)] * cell.batch.accumulation_steps
    return lambda: trainer.step(iter(micro_batches))


BATCHES = (512, 384, 256, 192, 128, 96, 64, 32, 16)
LARGEST_SHARE = 0.75
"""Of the device's memory that the largest batch may take: peers need more."""


def largest_batch(size: Size, *overrides: str) -> int:
    """Return how many images of a cell can be trained, and others' steps of as many."""
    if size.seconds == 0:
        return 16
    return next((n for n in BATCHES if _fits(size, *overrides, images=n)), BATCHES[-1])


def _fits(size: Size, *overrides: str, images: int) -> bool:
    try:
        torch.cuda.reset_peak_memory_stats()
        our_step(cell_of(size, *overrides, images=images))()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() < LARGEST_SHARE * torch.cuda.mem_get_info()[1]
    except Exception as error:
        if reason_of(error).startswith("out_of_memory"):
            return False
        raise
    finally:
        release(size)


def reason_of(error: BaseException) -> str:
    """Return what kept something from being measured: `refused`, `out_of_memory`, `failed`, and why."""
    status, text = ("refused", error) if isinstance(error, SystemExit) else classify(error)
    return f"{status}: {text}"


def seconds_of(step: Step, size: Size) -> float:
    """Return the median time of a step in seconds, after warm-up steps that pay for compilation."""
    for _ in range(size.steps):
        step()
    with garbage_collector_off():
        clock, until = StepClock(torch.device(size.device)), time.monotonic() + size.seconds
        clock.mark()
        while True:
            for _ in range(size.steps):
                step()
                clock.mark()
            times = clock.times_ms()
            if time.monotonic() >= until:
                return statistics.median(times) / 1e3


def release(size: Size) -> None:
    """Free what nobody holds any more."""
    gc.collect()
    if size.device == "cuda":
        torch.cuda.empty_cache()
