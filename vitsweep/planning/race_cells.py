"""The cells of a race as numbers: their settings, their runs so far, and why some are out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from math import log
from typing import Any

import numpy as np

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.racing.design import Design, Ints
from vitsweep.racing.model import Runs
from vitsweep.racing.race import NEVER
from vitsweep.results.record import RunRecord, Status

PEAKS = ("peak_allocated_gib", "peak_rss_gib")
"""Peak memory of a run's worst rank, on a GPU and on CPU."""


@dataclass(frozen=True, eq=False)
class RaceCells:
    """The runnable cells of a plan, numbered.

    Attributes:
        entries: in the order of the plan.
        settings: of the sweep.
    """

    entries: Sequence[PlannedCell]
    settings: SweepSettings

    @classmethod
    def of(cls, plan: SweepPlan, settings: SweepSettings) -> "RaceCells":
        """Number the cells that can run."""
        return cls(plan.runnable, settings)

    @cached_property
    def number(self) -> dict[str, int]:
        """Cell id -> number."""
        return {entry.cell_id: number for number, entry in enumerate(self.entries)}

    @cached_property
    def baselines(self) -> Ints:
        """Number of each cell's baseline, -1 where it has none that can run."""
        return np.array([self.number.get(e.baseline_id or "", -1) for e in self.entries], np.int64)

    @cached_property
    def design(self) -> Design:
        """The keys that the command sets, with their values."""
        keys = dict.fromkeys(
            text.lstrip("+").partition("=")[0]
            for entry in self.entries
            for text in entry.composed.overrides
        )
        kept = [key for key in keys if not key.startswith(("sweep", "hydra", "tracker", "~"))]
        return Design.of([{key: _value(entry, key) for key in kept} for entry in self.entries])

    def runs(self, records: Iterable[RunRecord]) -> Runs:
        """Return the measured runs as the race sees them: log of the objective, block, first of a block.

        Args:
            records: usable ones, oldest first.
        """
        measured = [run for run in records if self._log(run) is not None]
        blocks = {name: i for i, name in enumerate(dict.fromkeys(run.block for run in measured))}
        return Runs(
            cell=np.array([self.number[run.cell_id] for run in measured], np.int64),
            block=np.array([blocks[run.block] for run in measured], np.int64),
            first=np.array([float(run.position == 0) for run in measured]),
            log=np.array([self._log(run) for run in measured], float),
        )

    def left(
        self, records: Sequence[RunRecord], not_measured: Mapping[str, RunRecord]
    ) -> dict[str, tuple[int, str]]:
        """Return the cells that are out though nothing is said about their speed: block and reason.

        Args:
            records: usable ones, oldest first.
            not_measured: cell id -> its latest run, of cells that are not repeated.
        """
        names = dict.fromkeys(run.block for run in records if self._log(run) is not None)
        block = {name: i for i, name in enumerate(names)}
        limit = self.settings.memory_limit_gib
        found = {
            cell_id: (block.get(run.block, 0), f"{run.status}: {run.reason}")
            for cell_id, run in not_measured.items()
            if cell_id in self.number
        }
        for run in records:
            peak = peak_gib(run)
            if limit is not None and run.status == Status.measured and peak > limit:
                reason = f"used {peak:.3g} GiB, more than sweep.memory_limit_gib={limit:g}"
                found.setdefault(run.cell_id, (block.get(run.block, 0), reason))
        return found

    def left_numbers(self, left: Mapping[str, tuple[int, str]]) -> Ints:
        """Return for each cell the block in which it left, `NEVER` where it did not."""
        found = np.full(len(self.entries), NEVER)
        for cell_id, (block, _) in left.items():
            found[self.number[cell_id]] = block
        return found

    def _log(self, run: RunRecord) -> float | None:
        speed = run.metrics.get("images_per_second") if run.status == Status.measured else None
        if not speed or speed <= 0 or run.cell_id not in self.number:
            return None
        if self.settings.objective == "throughput_per_cost":
            speed /= self.entries[self.number[run.cell_id]].spec.resources.world_size
        return log(speed)


def peak_gib(run: RunRecord) -> float:
    """Return the peak memory of a run's worst rank in GiB; 0 where it was not measured."""
    known = [peak for column in PEAKS if (peak := run.metrics.get(column))]
    return float(known[0]) if known else 0.0


def seconds_of(records: Iterable[RunRecord]) -> float:
    """Return how long the blocks of some runs took, pauses between blocks left out."""
    ends: dict[str, tuple[float, float]] = {}
    for run in records:
        started = str(run.environment.get("started_at") or "")
        if started:
            begin = datetime.fromisoformat(started).timestamp()
            end = begin + float(run.environment.get("run_seconds") or 0.0)
            first, last = ends.get(run.block, (begin, end))
            ends[run.block] = min(first, begin), max(last, end)
    return sum(last - first for first, last in ends.values())


def _value(entry: PlannedCell, key: str) -> str:
    """Return the choice of a group, or the value of another key, of a cell."""
    if key in entry.composed.choices:
        return str(entry.composed.choices[key])
    node: Any = entry.tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return str(node)
