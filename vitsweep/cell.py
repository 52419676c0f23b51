"""One cell on one rank: build, parallelize, train, measure, summarize."""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitsweep.collectives.primitives import gathered
from vitsweep.data.damaged_images import named_damage
from vitsweep.errors import VitsweepError
from vitsweep.extras import INSTRUMENTS, load
from vitsweep.job_environment import boot_id
from vitsweep.measure.communication import (
    SentBytes,
    counted_bytes,
    naming_modules,
    profile_collectives,
    traced,
)
from vitsweep.measure.environment import (
    AttentionKernels,
    Compiled,
    ContentionMonitor,
    DeviceMonitor,
    StopMonitor,
    converted_layers,
    environment,
    seconds_since_start,
)
from vitsweep.measure.memory import memory_by_kind, peak_memory, reset_peak
from vitsweep.measure.summarize import RankSamples, Summary, summarize
from vitsweep.model.build import first_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.prove import proof_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
from vitsweep.spec.generators import seeded_generators
from vitsweep.training.checkpoint_manager import CheckpointManager, WeightKeeper
from vitsweep.training.epochs import Training, train_epochs
from vitsweep.training.shards import Unmoved, sketch_next_gradients, watch_weights
from vitsweep.training.timed_steps import (
    TimedSteps,
    endless,
    garbage_collector_off,
    instrumented_steps,
    timed_steps,
)
from vitsweep.training.trainer import MicroBatch, Trainer, unwrapped
from vitsweep.world import World, process_flags_kept

TOO_SLOW = "one step takes longer than `measurement.max_seconds`"
"""Why a run has neither bytes nor memory by kind: no further step is taken for them."""


class DivergedError(Exception):
    """The loss became inf or NaN: the speed does not count."""


class StoppedError(Exception):
    """A rank did not run for a part of the timed window: it says nothing about the cell."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a run needs to know besides its cell.

    Attributes:
        proved: how the cell was proved equal to reference training before ("" where it was not).
        folder: where weights go, and a profiler trace if `measurement.trace` is true.
        proved_exactly: the same of a cell that differs from it in its precision alone.
        checkpoints: resumes from earlier attempts of the run and lets this one be interrupted; None
            where nobody supervises the ranks.
        keep: writes the timed steps to disk on rank 0 before any instrument runs.
        instruments: whether any runs after them.
    """

    proved: str
    folder: Path
    proved_exactly: str = ""
    checkpoints: CheckpointManager | None = None
    keep: Callable[[Summary], None] = lambda summary: None
    instruments: bool = True


@process_flags_kept()
def run_cell(cell: CellSpec, world: World, context: RunContext) -> Summary:
    """Build, parallelize, train and measure one cell.

    Every rank calls it; the first one returns the summary of all, the others an empty one.

    Raises:
        WrongResultError: the techniques do not compute what the reference model computes.
        DivergedError: the loss became inf or NaN.
        StoppedError: a rank did not run for a part of the timed window.
        TrainingInterrupted: a stop was requested during training. The measurement and a checkpoint
            are saved then.
    """
    checkpoints = context.checkpoints if cell.task.epochs else None
    earlier = checkpoints.load_measurement() if checkpoints else None
    proved = context.proved
    if not (earlier or proved) and cell.measurement.prove != "none":
        proved = proof_of(cell, world, context.proved_exactly)
    with seeded_generators(cell.seed, "data"):
        batches = cell.data.open(cell, world)
    with (
        contextlib.closing(batches),
        named_damage(lambda: batches.damaged, context.folder, world.rank),
    ):
        if earlier:
            summary = Summary(**earlier)
        else:
            summary = _measure(cell, world, batches, context, proved)
        if checkpoints:
            checkpoints.save_measurement(asdict(summary), world)
        if cell.task.epochs:
            keeper = WeightKeeper(context.folder, cell.task.keep)
            training = _train(cell, world, batches, checkpoints, keeper)
            summary.metrics |= training.metrics
            summary.validity |= training.flags
            summary.environment |= training.reasons | keeper.facts()
            summary.samples |= {"training": training.curve} | training.samples
            if checkpoints and checkpoints.resumed:
                summary.environment |= {"resumed": checkpoints.resumed}
    return summary


def _measure(
    cell: CellSpec, world: World, batches: Batches, context: RunContext, proved: str
) -> Summary:
    """Take the samples of all ranks and summarize them."""
    compiled_before = Compiled.so_far()
    trainer = parallelize(first_model(cell), cell, world)
    reset_peak(world.device)  # the peak is that of training
    stream = endless(batches)
    lead_in = math.ceil(batches.prefetched / cell.batch.accumulation_steps)
    samples, timed, contention = _timed_samples(trainer, stream, lead_in, compiled_before)
    everyone = gathered(asdict(samples), on_first=True)
    ranks = [RankSamples.from_plain(found) for found in everyone]
    node = samples.environment["node"]
    own_seconds = sum(r.own_cpu_seconds for r in ranks if r.environment["node"] == node)
    validity = {"proved": proved, "shared_device": contention.shared(own_seconds)}

    def summary() -> Summary:
        if world.rank:
            return Summary(metrics={}, validity={}, environment={}, samples={})
        found = summarize(cell, ranks)
        found.validity |= validity
        return found

    if not context.instruments:
        return summary()
    if not cell.task.epochs:  # a training saves its measurement when it begins
        context.keep(summary())
    found = _instruments(trainer, stream, lead_in, timed, context)
    instruments = gathered(found, on_first=True)
    ranks = [rank.with_instruments(own) for rank, own in zip(ranks, instruments, strict=True)]
    return summary()


def _timed_samples(
    trainer: Trainer, stream: Iterator[MicroBatch], lead_in: int, compiled_before: Compiled
) -> tuple[RankSamples, TimedSteps, ContentionMonitor]:
    cell, world = trainer.cell, trainer.world
    sync_ranks(world)
    setup_seconds = seconds_since_start()
    # Only in a warm-up: they would slow a timed step.
    sketch: Callable[[], list[float]] = list
    unmoved: Callable[[], Unmoved] = dict
    if cell.measurement.warmup_steps:
        sketch, unmoved = sketch_next_gradients(trainer), watch_weights(trainer)
    contention, monitor = ContentionMonitor(world.device), DeviceMonitor(world.device)
    stops = StopMonitor()
    timed = timed_steps(trainer, stream, cell.measurement, lead_in)
    steps, compiled = len(timed.times_ms), Compiled.so_far().since(compiled_before)
    own_seconds, device_state = contention.end(), monitor.end(timed.window_start)
    peak = peak_memory(world.device)
    _refuse_stops(stops.end(timed.window_start))
    _refuse_divergence(trainer, f"{steps} steps")
    _refuse_skipped_graphs(cell, compiled)
    samples = RankSamples(
        step_times_ms=timed.times_ms,
        data_waits_ms=timed.data_waits_ms,
        warmup_steps=timed.warmup_steps,
        warmup_steps_added=timed.warmup_steps_added,
        cut_short=timed.cut_short,
        losses=torch.stack(timed.losses).tolist(),
        first_gradients=sketch(),
        unmoved_weights=unmoved(),
        skipped=_skipped(trainer, steps),
        setup_seconds=setup_seconds,
        compiled_graphs=compiled.graphs,
        compile_seconds=compiled.seconds,
        memory=dict(peak),
        device_state=device_state,
        throttled_seconds=timed.throttled_seconds,
        own_cpu_seconds=own_seconds,
        environment=environment(world.device) | {"fp8_layers": converted_layers(trainer.model)},
        machine=boot_id(),
    )
    return samples, timed, contention


def _instruments(
    trainer: Trainer,
    stream: Iterator[MicroBatch],
    lead_in: int,
    timed: TimedSteps,
    context: RunContext,
) -> dict[str, Any]:
    """Take further steps with what would disturb the timing; return fields of `RankSamples`."""
    phase_steps = 0 if timed.cut_short else trainer.cell.measurement.phase_steps
    sync_ranks(trainer.world)  # the first one has summarised and written meanwhile
    phases = instrumented_steps(trainer, stream, phase_steps)
    memory: dict[str, float | None] = {}
    memory_reason, sent = TOO_SLOW, SentBytes(reason=TOO_SLOW)
    kernels = AttentionKernels()
    if not timed.over_time:
        with kernels.noted(), counted_bytes() as sent:
            memory, memory_reason = memory_by_kind(trainer, stream)
    collectives = None
    if not timed.cut_short:
        collectives = profile_collectives(lambda: trainer.step(stream), trainer.world.device)
    extra = {
        name: load(f"{place}:run")(trainer, stream, lead_in)
        for name, place in INSTRUMENTS.items()
        if getattr(trainer.cell.measurement, name)
    }
    if trainer.cell.measurement.trace:
        # hooks would compile a compiled step anew
        is_eager = trainer.cell.compilation.scope == "nothing"
        with naming_modules(unwrapped(trainer.model)) if is_eager else contextlib.nullcontext():
            traced(lambda: trainer.step(stream), context.folder, trainer.world)
    return {
        "phases_ms": phases,
        "memory": memory,
        "memory_reason": memory_reason,
        "sent": asdict(sent),
        "collectives": collectives,
        "environment": {"attention_kernel": kernels.name},
        "extra": extra,
    }


def _train(
    cell: CellSpec,
    world: World,
    batches: Batches,
    checkpoints: CheckpointManager | None,
    keeper: WeightKeeper,
) -> Training:
    """Train for `task.epochs` from new weights: the timed steps had no learning-rate schedule."""
    if cell.task.resume_from and checkpoints is None:
        raise VitsweepError(
            f"`task.resume_from={cell.task.resume_from}` needs ranks that vitsweep starts: leave out "
            "torchrun or srun, or train from the beginning."
        )
    gc.collect()  # wrappers refer to each other: free the timed model before building another
    trained = replace(cell, optimizer=cell.recipe.optimizer(cell))
    trainer = parallelize(first_model(cell), trained, world, cell.recipe.drop_path)
    scheduled = cell.runtime.collects_garbage == "scheduled"
    with garbage_collector_off() if scheduled else contextlib.nullcontext():
        training = train_epochs(trainer, batches, checkpoints, keeper)
    _refuse_divergence(trainer, f"{training.curve[-1]['epoch']:g} epochs of {cell.task.epochs}")
    return training


def _refuse_divergence(trainer: Trainer, within: str) -> None:
    if bool(trainer.non_finite):
        raise DivergedError(f"The loss became inf or NaN within {within}.")


def _refuse_stops(seconds: float) -> None:
    """Refuse a window in which a rank did not run; every rank calls it with its own seconds."""
    of_ranks = gathered(seconds)
    longest = max(of_ranks)
    if longest:
        raise StoppedError(
            f"Rank {of_ranks.index(longest)} was stopped for {longest:.0f} s of the timed window, by a "
            "signal or with its machine."
        )


def _refuse_skipped_graphs(cell: CellSpec, compiled: Compiled) -> None:
    """Refuse figures of CUDA graphs where TorchInductor silently went without some."""
    if cell.compilation.replays_graphs and compiled.skipped:
        raise VitsweepError(
            f"`compilation.mode=reduce_overhead` replays CUDA graphs, and TorchInductor left out "
            f"{compiled.skipped} of them (`TORCH_LOGS=cudagraphs` shows why): the time would be that of "
            "another mode. Use `compilation.mode=default`."
        )


def _skipped(trainer: Trainer, steps: int) -> list[bool]:
    if not trainer.skipped:
        return [False] * steps
    return [bool(flag) for flag in torch.stack(trainer.skipped[:steps]).cpu()]


def sync_ranks(world: World) -> None:
    """Let all ranks start the next steps together."""
    if dist.is_initialized():
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
