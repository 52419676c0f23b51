"""The instrument of `measurement.traced_steps` in a rank, and what a record keeps of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vitsweep.cell import sync_ranks
from vitsweep.collectives.primitives import gathered
from vitsweep.extras.explain.step_trace import (
    RankTrace,
    TraceMarks,
    collectives_of,
    record_steps,
    reduced,
    trace_samples,
)
from vitsweep.measure.environment import machine
from vitsweep.training.timed_steps import mean_step_ms, undisturbed
from vitsweep.training.trainer import MicroBatch, Trainer


def run(trainer: Trainer, stream: Iterator[MicroBatch], prefetched_steps: int) -> dict[str, Any]:
    """Take plain and traced steps; both empty the loader's queue first, which a pause fills.

    Returns:
        The fields of a `RankTrace`.
    """
    steps, lead_in = trainer.cell.measurement.traced_steps, prefetched_steps + 1
    marks = TraceMarks()
    watched = marks.watched(stream)
    with undisturbed(trainer):
        sync_ranks(trainer.world)
        plain_ms = mean_step_ms(trainer, stream, steps, lead_in)
        sync_ranks(trainer.world)
        events = record_steps(
            lambda: trainer.step(watched, marks),
            lead_in + steps,
            trainer.world.device,
        )
    rows = reduced(events, steps, gathered(collectives_of(events)), gathered(machine()))
    return asdict(RankTrace(plain_ms, rows))


def samples_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples of a run from what `run` returned in each of its ranks."""
    return trace_samples([RankTrace(**rank) for rank in ranks])
