"""Packs pending runs into jobs: cells of one group share allocations, each with its baseline."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from vitsweep.execution.run_request import Run
from vitsweep.launchers.slurm.submit.settings import Request, SlurmSettings, groups, request_of
from vitsweep.planning.blocks import BalancedOrder, Block, blocks, comparisons, joined_looks
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord, Status

Looks = Callable[[SweepPlan, Mapping[str, int]], Iterable[Block]]

# How long the runs of a sweep take: measured, predicted, or assumed.


@dataclass(frozen=True)
class RunMinutes:
    """Expected minutes of a run of each cell.

    Attributes:
        minutes: cell id -> minutes.
        known: cells whose minutes were measured or predicted; those of the others are assumed.
    """

    minutes: dict[str, float]
    known: frozenset[str]


def run_minutes(
    plan: SweepPlan, runs: Sequence[RunRecord], predicted: Mapping[str, float], assumed: float
) -> RunMinutes:
    """Return the expected minutes of a run of every cell of the plan.

    A cell that ran takes the median of its measured runs. Another one takes its prediction, times
    what measured runs of this sweep took relative to theirs; without a prediction the median of
    all measured runs; without those `assumed`.

    Args:
        plan: the cells.
        runs: of the sweep, made so far.
        predicted: cell id -> predicted minutes of a run.
        assumed: `hydra.launcher.minutes_per_run`.
    """
    measured: dict[str, list[float]] = {}
    for run in runs:
        if run.status == Status.measured and "run_seconds" in run.environment:
            measured.setdefault(run.cell_id, []).append(run.environment["run_seconds"] / 60)
    medians = {cell_id: median(minutes) for cell_id, minutes in measured.items()}
    ratios = [minutes / predicted[c] for c, minutes in medians.items() if predicted.get(c)]
    ratio = median(ratios) if ratios else 1.0
    estimated = {cell_id: minutes * ratio for cell_id, minutes in predicted.items()}
    known = estimated | medians
    default = median(medians.values()) if medians else assumed
    return RunMinutes(
        {cell_id: known.get(cell_id, default) for cell_id in plan.entries},
        frozenset(plan.entries) & frozenset(known),
    )


LIMIT_MARGIN, START_MINUTES = 1.5, 5
"""Time limit of a job: its runs' expected minutes x margin + start of the job + timeout of one run."""


@dataclass(frozen=True)
class PlannedJob:
    """The work of one job.

    Attributes:
        blocks: in the order in which they run.
        minutes: how long that is expected to take.
        prune_slowdown: a cell that its look here shows more times slower than its baseline gets no block.
        any_look: the command looks at its intervals between the jobs, see `launchers.block_runner`.
    """

    blocks: tuple[Block, ...]
    minutes: float
    prune_slowdown: float | None = None
    any_look: bool = False

    @property
    def cells(self) -> set[str]:
        """Cells of which something runs here."""
        return {entry.cell_id for block in self.blocks for entry in block.entries}

    def document(self) -> dict[str, Any]:
        """Return it as the job reads it: the cells themselves are frozen.

        What belongs to the command and not to a frozen cell, and the code that was there when the
        job was submitted, stand under `cells`.
        """
        entries = {entry.cell_id: entry for block in self.blocks for entry in block.entries}
        return {
            "blocks": [self._plain(block) for block in self.blocks],
            **({"any_look": True} if self.any_look else {}),
            "cells": {
                cell_id: {
                    "measurement": entry.spec.measurement.of_command,
                    "code_hash": entry.code.hash,
                }
                for cell_id, entry in entries.items()
            },
        }

    def _plain(self, block: Block) -> dict[str, Any]:
        purpose = {"purpose": block.purpose} if block.purpose else {}
        return {"name": block.name, "runs": _runs(block)} | purpose | self._look(block)

    def _look(self, block: Block) -> dict[str, Any]:
        """Return what a job needs to know to leave out the cells that a look shows to be slow."""
        if not block.is_look:
            return {}
        compared = [e for e in block.entries if e.baseline_id not in (None, e.cell_id)]
        look = {
            "prune_slowdown": self.prune_slowdown,
            "baselines": {entry.cell_id: entry.baseline_id for entry in compared},
            "added": [entry.cell_id for entry in block.entries if entry.is_added_baseline],
        }
        return {"look": look}


def _runs(block: Block) -> list[dict[str, str]]:
    runs = [Run.new(block.name, n, e.cell_id) for n, e in enumerate(block.entries)]
    return [{"cell_id": run.cell_id, "run_id": run.name} for run in runs]


def pack(
    plan: SweepPlan,
    missing: Mapping[str, int],
    expected: RunMinutes,
    settings: SlurmSettings,
    cells_per_block: int,
    order: BalancedOrder | None = None,
    looks: Looks = lambda plan, missing: (),
    prune_slowdown: float | None = None,
) -> dict[Request, list[PlannedJob]]:
    """Return the jobs of every group, the longest first: a short one at the end wastes less.

    A time limit is shortened to what its jobs are expected to take, with a margin, where that is
    known: schedulers start short jobs earlier (backfill).

    Args:
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        expected: minutes of one run of each cell.
        settings: of the launcher; `cells_per_job`, `minutes_per_job` and `pair` decide.
        cells_per_block: cells of one block, baselines not counted.
        order: of the cells within blocks; one that knows of no earlier blocks where not given.
        looks: returns the looks that a job begins with, from its cells and the blocks that they lack.
        prune_slowdown: see `PlannedJob`.
    """
    order = order or BalancedOrder()
    pending = [entry for entry in plan.runnable if missing.get(entry.cell_id)]
    minutes_of_run = expected.minutes
    packed: dict[Request, list[PlannedJob]] = {}
    for request, members in groups(pending, settings).items():
        group = _with_baselines(plan, request, members, settings)
        jobs = [
            replace(
                _planned_job(job, group, missing, minutes_of_run, cells_per_block, order, looks),
                prune_slowdown=prune_slowdown,
            )
            for job in _bins(group, missing, minutes_of_run, settings, cells_per_block)
        ]
        jobs.sort(key=lambda job: -job.minutes)
        if all(job.cells <= expected.known for job in jobs):
            request = request.for_work_of(LIMIT_MARGIN * jobs[0].minutes + START_MINUTES, settings)
        packed.setdefault(request, []).extend(jobs)
    return packed


def without_unpaired_baselines(plan: SweepPlan, settings: SlurmSettings) -> SweepPlan:
    """Return the plan as its runs are counted: baselines that run in other jobs are no partners.

    Such a baseline shares no block with its cells, so that it needs all its runs for itself.
    """
    entries = dict(plan.entries)
    for cell_id, entry in plan.entries.items():
        baseline = plan.entries.get(entry.baseline_id or "")
        if baseline is None or baseline.cell_id == cell_id:
            continue
        requests = {request_of(e.spec, settings) for e in (entry, baseline)}
        if not settings.pair or len(requests) > 1:
            entries[cell_id] = replace(entry, baseline_id=None)
            entries[baseline.cell_id] = replace(entries[baseline.cell_id], is_added_baseline=False)
    return SweepPlan(entries)


def _with_baselines(
    plan: SweepPlan, request: Request, members: list[PlannedCell], settings: SlurmSettings
) -> SweepPlan:
    """Return the group as a plan; a baseline that asks for other resources cannot run beside it."""
    needed = dict.fromkeys(e.baseline_id for e in members if e.baseline_id)  # in one order always
    baselines = [plan.entries[b] for b in needed]
    paired = {e.cell_id for e in groups(baselines, settings).get(request, []) if settings.pair}
    cells = {e.cell_id: e for e in [*baselines, *members]}
    return SweepPlan(
        {
            key: entry if entry.baseline_id in paired else replace(entry, baseline_id=None)
            for key, entry in cells.items()
        }
    )


def _bins(
    plan: SweepPlan,
    missing: Mapping[str, int],
    minutes_of_run: Mapping[str, float],
    settings: SlurmSettings,
    cells_per_block: int,
) -> Iterator[list[PlannedCell]]:
    """Yield the cells of one job after the other; a comparison is split only if it does not fit."""
    fixed = None if settings.cells_per_job == "auto" else settings.cells_per_job
    pending = [entry for entry in plan.entries.values() if missing.get(entry.cell_id)]
    minutes_of_cell = {e.cell_id: missing[e.cell_id] * minutes_of_run[e.cell_id] for e in pending}
    fitting = max(1, int(settings.minutes_per_job / max(minutes_of_cell.values(), default=1)) - 1)
    job: list[PlannedCell] = []
    minutes = 0.0
    for part in comparisons(pending, min(cells_per_block, fixed or fitting)):
        costs = sum(minutes_of_cell[e.cell_id] for e in part)
        costs += _baseline_minutes(part, missing, minutes_of_run)
        full = len(job) + len(part) > fixed if fixed else minutes + costs > settings.minutes_per_job
        if job and full:
            yield job
            job, minutes = [], 0.0
        job, minutes = [*job, *part], minutes + costs
    if job:
        yield job


def _baseline_minutes(
    part: list[PlannedCell], missing: Mapping[str, int], minutes_of_run: Mapping[str, float]
) -> float:
    num_blocks = max(missing[entry.cell_id] for entry in part)
    baselines = {e.baseline_id for e in part if e.baseline_id} - {e.cell_id for e in part}
    return num_blocks * sum(minutes_of_run[baseline] for baseline in baselines)


def _planned_job(
    members: list[PlannedCell],
    plan: SweepPlan,
    missing: Mapping[str, int],
    minutes_of_run: Mapping[str, float],
    cells_per_block: int,
    order: BalancedOrder,
    looks: Looks,
) -> PlannedJob:
    missing_here = {entry.cell_id: missing[entry.cell_id] for entry in members}
    baselines = [plan.entries[e.baseline_id] for e in members if e.baseline_id]
    plan_here = SweepPlan({entry.cell_id: entry for entry in [*members, *baselines]})
    planned = (
        *joined_looks(looks(plan_here, missing_here)),
        *blocks(plan_here, missing_here, cells_per_block, order),
    )
    return PlannedJob(planned, sum(minutes_of_run[e.cell_id] for b in planned for e in b.entries))
