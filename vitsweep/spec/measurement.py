"""How a cell is measured: warm-up, steps, blocks, proof."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

NOT_IDENTITY = {"identity": False}
"""Marks fields that change how sure a number is, not the number: they stay out of the cell id."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Warm-up and window of a run, number of blocks, and what is proved before.

    Attributes:
        warmup_steps: steps at the start of each run that are never counted (more may be cut where
            the samples show that the steady state came later).
        measured_steps: steps after them.
        phase_steps: instrumented steps after the timed ones, for the split into phases.
        blocks: runs of every cell, each in another block; the error bar comes from their spread.
        prove: `twin` trains a nano copy with the same techniques first and compares it with plain
            single-process training; `none` trusts the techniques.
        trace: keep a profiler trace of one step in the run's folder.
        timeout_min: a run that takes longer is ended with status `timed_out`.
    """

    name: str
    warmup_steps: Annotated[int, Ge(0)]
    measured_steps: Annotated[int, Ge(1)]
    phase_steps: Annotated[int, Ge(0)]
    blocks: Annotated[int, Ge(1)] = field(metadata=NOT_IDENTITY)
    prove: Literal["twin", "none"] = field(metadata=NOT_IDENTITY)
    trace: bool = field(metadata=NOT_IDENTITY)
    timeout_min: Annotated[float, Gt(0)] = field(metadata=NOT_IDENTITY)
