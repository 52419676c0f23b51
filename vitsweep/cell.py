"""THE page: one cell, on one rank, from its spec to what will be recorded."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitsweep.equivalence import prove
from vitsweep.measure.communication import CommunicationCounter, collective_ms
from vitsweep.measure.contention import ContentionMonitor, throttled
from vitsweep.measure.environment import environment, machine
from vitsweep.measure.memory_parts import step_in_parts
from vitsweep.measure.memory_peak import peak_memory, reset_peak
from vitsweep.measure.summarize import RankSamples, Summary, summarize
from vitsweep.measure.trace import traced
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Batches
from vitsweep.training.checkpoint_manager import CheckpointManager
from vitsweep.training.loop import endless, instrumented_steps, timed_steps, train_epochs
from vitsweep.training.trainer import MicroBatch, Trainer
from vitsweep.world import World


class DivergedError(Exception):
    """The loss became inf or NaN: the speed does not count."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What a run needs to know beside its cell.

    Attributes:
        calibration: matmul TFLOP/s by dtype and all-reduce GB/s of this machine.
        proved: how equality was proved before ("" where it was not).
        trace_folder: where a profiler trace goes if the cell asks for one.
        checkpoints: knows what earlier attempts of the run left, and lets this one be interrupted;
            None where nobody supervises the ranks.
    """

    calibration: dict[str, float]
    proved: str
    trace_folder: Path
    checkpoints: CheckpointManager | None = None


def run_cell(cell: CellSpec, world: World, around: RunContext) -> Summary:
    """Build, parallelize, train and measure one cell; every rank calls it, all get the summary.

    Raises:
        WrongResultError: the techniques do not compute what the plain model computes.
        DivergedError: the loss became non-finite.
        Interrupted: training was told to stop; it is saved, and so is what was measured.
    """
    checkpoints = around.checkpoints if cell.task.epochs else None
    kept = checkpoints.measured() if checkpoints else None
    proved = "" if kept else around.proved or _prove(cell, world)
    reset_peak(world.device)
    with contextlib.closing(cell.data.open(cell, world)) as batches:
        if kept:
            summary = Summary(**kept)
        else:
            summary = _measured(cell, world, batches, around, proved)
        if checkpoints:
            checkpoints.keep_measured(asdict(summary), world)
        if cell.task.epochs:
            summary.metrics |= _trained(cell, world, batches, checkpoints)
    return summary


def _measured(
    cell: CellSpec, world: World, batches: Batches, around: RunContext, proved: str
) -> Summary:
    """Time the steps; return what they say over all ranks."""
    samples, contention, slow = _timed(_new_trainee(cell, world), batches, around)
    ranks = _gather(samples, world)
    summary = summarize(cell, ranks, around.calibration)
    node = samples.environment["node"]
    own_seconds = sum(r.own_cpu_seconds for r in ranks if r.environment["node"] == node)
    summary.validity |= {
        "proved": proved,
        "shared_device": contention.shared(own_seconds),
        "throttled": slow,
    }
    return summary


def _prove(cell: CellSpec, world: World) -> str:
    if cell.measurement.prove == "none":
        return ""
    return f"twin {prove(cell, world):.1e}"


def _new_trainee(cell: CellSpec, world: World) -> Trainer:
    torch.manual_seed(cell.seed)
    return parallelize(build_model(cell).to(world.device), cell, world)


def _timed(
    trainer: Trainer, batches: Batches, around: RunContext
) -> tuple[RankSamples, ContentionMonitor, bool | None]:
    """Take the timed steps, then those that cannot be timed undisturbed."""
    cell, world = trainer.cell, trainer.world
    stream = endless(batches)
    steps = cell.measurement.warmup_steps + cell.measurement.measured_steps
    _sync_ranks(world)
    contention = ContentionMonitor(world.device)
    times, losses = timed_steps(trainer, stream, steps)
    own_seconds, slow = contention.end(), throttled(world.device)
    memory = peak_memory(world.device)
    _refuse_divergence(trainer, f"{steps} steps")
    samples = RankSamples(
        step_times_ms=times,
        losses=torch.stack(losses).tolist(),
        skipped=_skipped(trainer, steps),
        phases_ms=instrumented_steps(trainer, stream, cell.measurement.phase_steps),
        memory=memory | step_in_parts(trainer, stream),
        own_cpu_seconds=own_seconds,
        environment=environment(world.device),
        machine=machine(),
        **_communication(trainer, stream),
    )
    _trace(trainer, stream, around)
    return samples, contention, slow


def _trained(
    cell: CellSpec, world: World, batches: Batches, checkpoints: CheckpointManager | None
) -> dict[str, float]:
    """Train to an accuracy, from new weights: the timed steps know no warm-up of the rate."""
    gc.collect()  # wrappers hold each other: the timed model must be gone before there is another
    trainer = _new_trainee(cell, world)
    found = train_epochs(trainer, batches, checkpoints)
    _refuse_divergence(trainer, f"{cell.task.epochs} epochs")
    return found


def _refuse_divergence(trainer: Trainer, within: str) -> None:
    if bool(trainer.non_finite):
        raise DivergedError(f"The loss became inf or NaN within {within}.")


def _communication(trainer: Trainer, stream: Iterator[MicroBatch]) -> dict[str, Any]:
    """One step under the counter, one under the profiler: neither is among the timed ones."""
    with CommunicationCounter() as counter:
        trainer.step(stream)
    return {
        "communication_ms": collective_ms(lambda: trainer.step(stream), trainer.world.device),
        "sent_bytes": {p: counter.sent(p) for p in ("parameter", "gradient", "activation")},
        "collectives": counter.by_collective(),
    }


def _trace(trainer: Trainer, stream: Iterator[MicroBatch], around: RunContext) -> None:
    if trainer.cell.measurement.trace:
        traced(lambda: trainer.step(stream), around.trace_folder, trainer.world)


def _skipped(trainer: Trainer, steps: int) -> list[bool]:
    if not trainer.skipped:
        return [False] * steps
    return [bool(flag) for flag in torch.stack(trainer.skipped[:steps]).cpu()]


def _sync_ranks(world: World) -> None:
    """Let all ranks start the timed steps together."""
    if dist.is_initialized():
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _gather(samples: RankSamples, world: World) -> list[RankSamples]:
    if not dist.is_initialized():
        return [samples]
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, samples)
    return gathered
