"""Steps of vitsweep's cells and of other libraries' ViTs, timed in turns in one process."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peers
import torch
from gpu_steps import (
    ENDED,
    NO_TIME,
    Run,
    Size,
    Step,
    cell_of,
    end_if_lost,
    our_step,
    reason_of,
    release,
    seconds_of,
)
from torch import nn

from vitsweep.measure.environment import DeviceMonitor
from vitsweep.measure.memory import peak_memory, reset_peak
from vitsweep.measure.utilization import attainable, throughput
from vitsweep.model.precision import set_process_flags
from vitsweep.world import allow_tf32

MOST_COMPILATIONS = 10_000
MOST_KEPT = 0.5
"""Share of the device's memory that steps may hold between their turns."""


@dataclass
class Contender:
    """Something that trains, built when its turn comes.

    Attributes:
        name: in the tables.
        build: returns its training step.
        images: of a step.
        model_tflop: of a step, 10^12 floating-point operations of forward and backward.
        prepare: sets what torch keeps per process, before every turn.
        step_ms: median of each turn.
        peak_gib: allocated for it at most.
        reason: why it was not measured, or "".
        reach: sustained TFLOP/s by dtype -> what its own products could reach.
        state: of the GPU in its last turn.
    """

    name: str
    build: Callable[[], Step]
    images: int
    model_tflop: float
    prepare: Callable[[], None] = lambda: allow_tf32(False)
    step_ms: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    reason: str = ""
    reach: Callable[[dict[str, float]], float | None] = lambda rates: rates.get("bfloat16")
    state: dict[str, Any] = field(default_factory=dict)

    def row(self, rates: dict[str, float]) -> dict[str, Any]:
        """Return its figures; `rates` are those of large matrix products in TFLOP/s, by dtype."""
        sustained = self.reach(rates)
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
                **self.state,
            }
        return row

    def go_on_from(self, row: dict[str, Any]) -> None:
        """Take the figures that an earlier process of this part has measured."""
        self.reason = row["reason"]
        self.step_ms, self.peak_gib = row.get("turns_ms", []), row.get("peak_gib")


def ours(name: str, size: Size, *overrides: str, images: int) -> Contender:
    """A cell; what keeps it from running is its reason."""
    try:
        cell = cell_of(size, *overrides, images=images)
    except SystemExit as refused:
        return Contender(name, list, images, 0.0, reason=reason_of(refused))
    tflops = throughput(cell, 1e3)["model_tflops_per_rank"] or 0.0  # a step of one second
    build, prepare = partial(our_step, cell), partial(set_process_flags, cell)
    return Contender(name, build, images, tflops, prepare, reach=partial(attainable, cell))


def theirs(name: str, size: Size, images: int, *, compiled: str, model_tflop: float) -> Contender:
    """Another library's ViT under bfloat16 autocast and fused AdamW.

    Args:
        name: of the peer, as in `peers.available`.
        size: what is trained.
        images: of a step.
        compiled: `blocks` (one compilation for all of them), `model`, or `nothing`.
        model_tflop: of a step.
    """

    def build() -> Step:
        setting = peers.Setting(name, size.model, "bf16", size.device, size.resolution_px, 0, 0)
        with torch.device(size.device):  # a ViT-L is drawn for seconds on the host
            model = peers.recipe(setting)().train()
        if compiled == "model":
            model.compile(dynamic=False)
        if compiled == "blocks":
            for block in _blocks(model, peers.SHAPES[size.model][0]):
                block.compile(dynamic=False)
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

    shown = {"nothing": name, "blocks": f"{name} with compiled blocks", "model": f"{name} compiled"}
    return Contender(shown[compiled], build, images, model_tflop)


def _blocks(model: nn.Module, depth: int) -> nn.Module:
    """Return the list of a peer's blocks, wherever it keeps them."""
    lists = (m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    return next(blocks for blocks in lists if len(blocks) == depth)


def time_in_turns(
    contenders: Sequence[Contender], run: Run, turns: int, finished: Callable[[], None]
) -> None:
    """Measure all contenders, first to last and back again, until the time is over.

    Those that fit are kept on the device between their turns, others are built anew.

    Args:
        contenders: filled with their figures; those that have a reason or enough turns are left out.
        run: the part; what has not begun by its deadline is left out, with that reason.
        turns: at most.
        finished: called before and after every measurement, to write what there is.
    """
    # Every contender compiles the same functions; beyond the limit torch would go on without compiling.
    torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = MOST_COMPILATIONS
    kept: dict[str, Step] = {}
    for turn in range(turns):
        for contender in contenders if turn % 2 == 0 else reversed(contenders):
            if contender.reason or len(contender.step_ms) > turn:
                continue
            if run.is_late:
                contender.reason = "" if contender.step_ms else NO_TIME
                continue
            contender.reason = ENDED
            finished()
            contender.reason = _turn(contender, run.size, kept)
            finished()
            end_if_lost(run.size)
        if run.is_late:
            break
    kept.clear()
    release(run.size)


def _turn(contender: Contender, size: Size, kept: dict[str, Step]) -> str:
    """Measure once; return why that failed, or "". Steps that were kept give way if memory runs out."""
    while True:
        try:
            _measure(contender, size, kept)
            return ""
        except (Exception, SystemExit) as error:  # the others go on
            reason = reason_of(error)
        kept.pop(contender.name, None)
        if not (kept and reason.startswith("out_of_memory")):
            return reason
        kept.clear()


def _measure(contender: Contender, size: Size, kept: dict[str, Step]) -> None:
    device, before = torch.device(size.device), 0.0
    contender.prepare()
    step = kept.get(contender.name)
    if step is None:
        release(size)
        before = _allocated_gib(size)
        step = contender.build()
    reset_peak(device)
    monitor, since = DeviceMonitor(device), time.perf_counter()
    try:
        contender.step_ms.append(seconds_of(step, size) * 1e3)
    finally:
        state = monitor.end(since)
    contender.state = {
        "sm_clock_mhz": state.sm_clock_mhz,
        "power_capped_share": state.power_capped_share,
        "throttled": state.throttled,
    }
    if contender.peak_gib is None:
        peaks = (gib for gib in peak_memory(device).values() if gib is not None)
        contender.peak_gib = next(peaks) - before
    release(size)  # what the caching allocator holds is free for the next contender
    if size.device == "cuda" and _free_share() > 1 - MOST_KEPT:
        kept[contender.name] = step


def _allocated_gib(size: Size) -> float:
    return torch.cuda.memory_allocated() / 2**30 if size.device == "cuda" else 0.0


def _free_share() -> float:
    free, total = torch.cuda.mem_get_info()
    return free / total
