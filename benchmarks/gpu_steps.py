"""Training steps of vitsweep's cells and of other libraries' ViTs in one process, timed in turns.

Starting a process per run, as sweeps do, takes 10 s on a GPU; in eight minutes that is most of it.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import peers
import torch

from vitsweep.composition.composer import Composer
from vitsweep.execution.failures import classify
from vitsweep.measure.clocks import StepClock
from vitsweep.measure.memory import peak_memory, reset_peak
from vitsweep.measure.utilization import throughput
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.machine import Machine
from vitsweep.world import World

Step = Callable[[], Any]
WARM_UP_STEPS = 3


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


SMOKE = Size("cpu", "vit_tiny", 32, ("model.depth=2",), 0.0)


@dataclass
class Contender:
    """Something that trains, built when its turn comes.

    Attributes:
        name: in the tables.
        build: returns its training step.
        images: of a step.
        model_tflop: of a step, 10^12 floating-point operations of forward and backward.
        step_ms: median of each turn.
        peak_gib: allocated for it at most.
        reason: why it was not measured, or "".
    """

    name: str
    build: Callable[[], Step]
    images: int
    model_tflop: float
    step_ms: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    reason: str = ""

    def row(self, sustained: float | None) -> dict[str, Any]:
        """Return its figures; `sustained` is the rate of large matrix products in TFLOP/s."""
        row: dict[str, Any] = {"name": self.name, "images": self.images, "reason": self.reason}
        if self.step_ms:
            milliseconds = statistics.median(self.step_ms)
            tflops = self.model_tflop / milliseconds * 1e3
            row |= {
                "step_ms": milliseconds,
                "turns_ms": self.step_ms,
                "images_per_second": self.images / milliseconds * 1e3,
                "tflops": tflops,
                "share_of_sustained": tflops / sustained if sustained else None,
                "peak_gib": self.peak_gib,
            }
        return row


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


def ours(name: str, size: Size, *overrides: str, images: int) -> Contender:
    """A cell; what keeps it from running is its reason."""
    try:
        cell = cell_of(size, *overrides, images=images)
    except SystemExit as refused:
        return Contender(name, list, images, 0.0, reason=reason_of(refused))
    tflops = throughput(cell, 1e3)["model_tflops_per_rank"] or 0.0  # a step of one second
    return Contender(name, lambda: our_step(cell), images, tflops)


def theirs(name: str, size: Size, images: int, *, compiled: bool, model_tflop: float) -> Contender:
    """Another library's ViT under bfloat16 autocast and fused AdamW."""

    def build() -> Step:
        setting = peers.Setting(
            name.removesuffix(" compiled"),
            size.model,
            "bf16",
            size.device,
            size.resolution_px,
            0,
            0,
        )
        model = peers.recipe(setting)().to(size.device).train()
        if compiled:
            model.compile(dynamic=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        side = size.resolution_px
        inputs = torch.randn(images, 3, side, side, device=size.device)
        labels = torch.randint(1000, (images,), device=size.device)

        def step() -> None:
            with torch.autocast(size.device, torch.bfloat16):
                logits = model(inputs)
            torch.nn.functional.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return Contender(name, build, images, model_tflop)


def time_in_turns(
    contenders: Sequence[Contender],
    size: Size,
    turns: int,
    deadline: float,
    finished: Callable[[], None],
) -> None:
    """Measure all contenders, first to last and back again, until the time is over.

    Those that fit are kept on the device between their turns, others are built anew.

    Args:
        contenders: filled with their figures.
        size: device and seconds of a turn.
        turns: at most.
        deadline: of `time.monotonic`; what has not begun by then is left out, with that reason.
        finished: called after every measurement, to write what there is.
    """
    kept: dict[str, Step] = {}
    for turn in range(turns):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            if contender.reason:
                continue
            if time.monotonic() > deadline:
                contender.reason = "" if contender.step_ms else "no time was left"
                continue
            try:
                _take_turn(contender, size, kept)
            except (Exception, SystemExit) as error:  # the others go on
                contender.reason = reason_of(error)
                kept.pop(contender.name, None)
            finished()
        if time.monotonic() > deadline:
            break
    kept.clear()
    release(size)


def reason_of(error: BaseException) -> str:
    """Return what kept something from being measured: `refused`, `out_of_memory`, `failed`, and why."""
    status, text = ("refused", error) if isinstance(error, SystemExit) else classify(error)
    return f"{status}: {text}"


def _take_turn(contender: Contender, size: Size, kept: dict[str, Step]) -> None:
    device, before = torch.device(size.device), 0.0
    step = kept.get(contender.name)
    if step is None:
        release(size)
        before = _allocated_gib(size)
        step = contender.build()
    reset_peak(device)
    contender.step_ms.append(seconds_of(step, size) * 1e3)
    if contender.peak_gib is None:
        peaks = (gib for gib in peak_memory(device).values() if gib is not None)
        contender.peak_gib = next(peaks) - before
    if size.device == "cuda" and _free_share() > 0.5:
        kept[contender.name] = step


def seconds_of(step: Step, size: Size) -> float:
    """Return the median time of a step in seconds, after warm-up steps that pay for compilation."""
    device = torch.device(size.device)
    for _ in range(WARM_UP_STEPS):
        step()
    clock, until = StepClock(device), time.monotonic() + size.seconds
    clock.mark()
    while True:
        for _ in range(WARM_UP_STEPS):  # the queue of a GPU is emptied once in three steps
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


def _allocated_gib(size: Size) -> float:
    return torch.cuda.memory_allocated() / 2**30 if size.device == "cuda" else 0.0


def _free_share() -> float:
    free, total = torch.cuda.mem_get_info()
    return free / total
