"""How a cell is measured: warm-up, steps, blocks, proof."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

NOT_IDENTITY = {"identity": False}
"""Marks fields that change how sure a number is, not the number: they stay out of the cell id.

They belong to the command that measures, not to the cell: two commands may differ in them.
"""

MIN_BLOCKS = 3
"""With fewer blocks no interval is shown: Student's t with one degree of freedom is too wide."""

MOST_BLOCKS = 10_000
MOST_TRACED_STEPS = 100
"""A profiler keeps every operation in memory."""
MINUTES_PER_YEAR = 525_600
AUTO: dict[str, dict[str, float]] = {
    "warmup_min_seconds": {"cpu": 0.2, "cuda": 1.0},
    "fewest_steps": {"cpu": 0, "cuda": 5},
    "min_seconds": {"cpu": 0.5, "cuda": 1.5},
    "max_seconds": {"cpu": 30.0, "cuda": 60.0},
}
"""Field -> device type -> its value where a choice says `auto`."""
AT_MOST = {
    "min_seconds": "max_seconds", "warmup_min_seconds": "max_seconds", "fewest_steps": "measured_steps",
}  # fmt: skip
"""Field -> the field that it must not exceed, unless its value is of `AUTO`."""
AUTO_STEPS = 10
"""`measured_steps` where a choice says `auto`: a part of the cell's identity, the same on all devices."""
SCREENING_SECONDS = 1.0
"""`max_seconds` of a screening run."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Warm-up and window of a run, number of blocks, and what is proved before.

    Attributes:
        warmup_steps: least number of steps before the timed window; more where the loader holds
            more batches ready.
        warmup_min_seconds: least duration of the warm-up; clocks of a GPU settle in seconds.
        measured_steps: least number of steps in the timed window.
        fewest_steps: so many are enough where they last `min_seconds`; 0 for `measured_steps`.
        min_seconds: least duration of the timed window; steps are added until both hold.
        max_seconds: most seconds in the timed window, and in the warm-up; steps beyond
            it are left out, but for one step of the warm-up and two of the window.
        phase_steps: instrumented steps after the timed ones, for the split into phases.
        blocks: runs of every cell, each in another block; the error bar comes from their spread.
        prove: `twin` trains a nano copy with the same techniques first and compares it with reference
            training in one process; `none` trusts the techniques.
        trace: keep a profiler trace of one step in the run's folder.
        traced_steps: steps under the profiler at the end of a run, which its record keeps as a table of
            operators by class of time; 0 for none.
        start: `spawned` ranks are new interpreters, `forked` ones share what a server has imported, which
            their resident memory does not show. `auto` is resolved so that cells that are compared start
            alike.
        timeout_min: a run that takes longer is ended with status `timed_out`.
    """

    name: str
    warmup_steps: Annotated[int, Ge(0)]
    warmup_min_seconds: Annotated[float, Ge(0)] = field(metadata=NOT_IDENTITY)
    measured_steps: Annotated[int, Ge(1)]
    min_seconds: Annotated[float, Ge(0)] = field(metadata=NOT_IDENTITY)
    max_seconds: Annotated[float, Gt(0)] = field(metadata=NOT_IDENTITY)
    phase_steps: Annotated[int, Ge(0)]
    blocks: Annotated[int, Ge(1), Le(MOST_BLOCKS)] = field(metadata=NOT_IDENTITY)
    prove: Literal["twin", "none"] = field(metadata=NOT_IDENTITY)
    trace: bool = field(metadata=NOT_IDENTITY)
    fewest_steps: Annotated[int, Ge(0)] = field(default=0, metadata=NOT_IDENTITY)
    traced_steps: Annotated[int, Ge(0), Le(MOST_TRACED_STEPS)] = field(
        default=0, metadata=NOT_IDENTITY
    )
    start: Literal["auto", "forked", "spawned"] = field(default="auto", metadata=NOT_IDENTITY)
    timeout_min: Annotated[float, Gt(0), Le(MINUTES_PER_YEAR)] = field(metadata=NOT_IDENTITY)

    @property
    def least_steps(self) -> int:
        """Steps in the timed window at least, if it lasts `min_seconds`."""
        return min(self.fewest_steps or self.measured_steps, self.measured_steps)

    def for_screening(self) -> "Measurement":
        """Return it for a screening run, as short as can be, to tell whether a cell is worth its blocks."""
        longest = min(self.max_seconds, SCREENING_SECONDS)
        return replace(
            self,
            warmup_min_seconds=0.0,
            min_seconds=0.0,
            max_seconds=longest,
            trace=False,
            traced_steps=0,
        )


OF_COMMAND = tuple(f.name for f in fields(Measurement) if not f.metadata.get("identity", True))
"""Fields that belong to the command, not to the cell."""
