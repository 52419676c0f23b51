"""The cells of a race as numbers: their settings, their runs so far, and why some are out."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from vitsweep.composition.sweep_settings import TIME_TO_ACCURACY, SweepSettings
from vitsweep.files import write_atomically
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.racing.conclusions import LEVEL, NEVER, Verdict
from vitsweep.racing.model import Design, Ints, Runs
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.sweeps import RACE
from vitsweep.tables.stats import DRIFT_LEVEL, drift

COLUMNS = {TIME_TO_ACCURACY: "seconds_to_target"}
"""Objective -> column of a run, where it is not throughput."""
PEAKS = ("peak_allocated_gib", "peak_rss_gib")
"""Peak memory of a run's worst rank, on a GPU and on CPU."""


@dataclass(frozen=True, eq=False)
class RaceCells:
    """The runnable cells of a plan, numbered.

    With `sweep.replicate=seed` cells that differ in their seed alone are one cell of the race, and each
    block trains all its cells with another of the seeds.

    Attributes:
        groups: the cells of the plan that are one cell of the race, in the order of the plan.
        settings: of the sweep.
        predicted: cell id -> log of its predicted throughput, for all cells or for none.
    """

    groups: Sequence[Sequence[PlannedCell]]
    settings: SweepSettings
    predicted: Mapping[str, float]

    @classmethod
    def of(
        cls, plan: SweepPlan, settings: SweepSettings, predicted: Mapping[str, float]
    ) -> "RaceCells":
        """Number the cells that can run."""
        groups: dict[str, list[PlannedCell]] = {}
        for entry in plan.runnable:
            spec = replace(entry.spec, seed=0) if settings.replicate else entry.spec
            groups.setdefault(spec.cell_id, []).append(entry)
        return cls(list(groups.values()), settings, predicted)

    @cached_property
    def entries(self) -> Sequence[PlannedCell]:
        """The first cell of each group, which stands for it."""
        return [group[0] for group in self.groups]

    @cached_property
    def number(self) -> dict[str, int]:
        """Cell id -> number."""
        return {entry.cell_id: n for n, group in enumerate(self.groups) for entry in group}

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds of the cells, ascending."""
        return sorted({entry.spec.seed for group in self.groups for entry in group})

    def first_of(self, cell_id: str) -> str:
        """Return the cell that stands for the group of a cell; the cell itself where it cannot run."""
        return self.entries[self.number[cell_id]].cell_id if cell_id in self.number else cell_id

    def with_seed(self, cell_id: str, turn: int) -> PlannedCell:
        """Return the cell of a group whose seed it is in this turn, or the first where it has none."""
        group, seed = self.groups[self.number[cell_id]], self.seeds[turn % len(self.seeds)]
        return next((entry for entry in group if entry.spec.seed == seed), group[0])

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
        if self.settings.replicate:
            kept = [key for key in kept if key != self.settings.replicate]
        settings = [{key: _value(entry, key) for key in kept} for entry in self.entries]
        logs = [self._predicted_log(entry) for entry in self.entries]
        return Design.of(settings, np.array(logs) if self.predicted else None)

    def runs(self, records: Iterable[RunRecord]) -> Runs:
        """Return the measured runs as the race sees them: log of the objectives, block, first of a block.

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
            log_cost=np.array([log(peak_gib(run)) for run in measured], float)
            if self.settings.is_front
            else None,
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
        found = {
            self.first_of(cell_id): (block.get(run.block, 0), f"{run.status}: {run.reason}")
            for cell_id, run in not_measured.items()
            if cell_id in self.number
        }
        for run in records:
            if run.cell_id in self.number and (reason := self._unfit(run)):
                found.setdefault(self.first_of(run.cell_id), (block.get(run.block, 0), reason))
        return found

    def _unfit(self, run: RunRecord) -> str:
        """Return why a measured run takes its cell out of the race; "" where it does not."""
        limit, peak = self.settings.memory_limit_gib, peak_gib(run)
        if run.status != Status.measured:
            return ""
        if limit is not None and peak > limit:
            return f"used {peak:.3g} GiB, more than sweep.memory_limit_gib={limit:g}"
        if self.settings.is_front and not peak:
            return "its peak memory was not measured"
        if self.settings.speed == TIME_TO_ACCURACY and not run.metrics.get("seconds_to_target"):
            best = run.metrics.get("accuracy_top1")
            ended = "" if best is None else f", {best:.4f} at the end"
            return (
                f"did not reach task.target_accuracy={run.spec.get('task.target_accuracy')}{ended}"
            )
        return ""

    def left_numbers(self, left: Mapping[str, tuple[int, str]]) -> Ints:
        """Return for each cell the block in which it left, `NEVER` where it did not."""
        found = np.full(len(self.entries), NEVER)
        for cell_id, (block, _) in left.items():
            found[self.number[cell_id]] = block
        return found

    def _log(self, run: RunRecord) -> float | None:
        column = COLUMNS.get(self.settings.speed, "images_per_second")
        value = run.metrics.get(column) if run.status == Status.measured else None
        if not value or value <= 0 or run.cell_id not in self.number:
            return None
        if self.settings.is_front and not peak_gib(run):
            return None
        if self.settings.speed == TIME_TO_ACCURACY:
            return -log(value)
        return log(value) - self._log_price(self.entries[self.number[run.cell_id]])

    def _log_price(self, entry: PlannedCell) -> float:
        per_cost = self.settings.speed == "throughput_per_cost"
        return log(entry.spec.resources.world_size) if per_cost else 0.0

    def _predicted_log(self, entry: PlannedCell) -> float:
        return self.predicted.get(entry.cell_id, 0.0) - self._log_price(entry)


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


# `race.json` of a sweep folder: how far a race came, for tables and charts.


def write_race(folder: Path, document: Mapping[str, Any]) -> None:
    """Replace what a race wrote into a sweep folder."""
    write_atomically(folder / RACE, json.dumps(document, separators=(",", ":")))


def state_of_race(
    cells: RaceCells,
    labels: Mapping[str, str],
    runs: Runs,
    verdicts: Sequence[Verdict],
    left: Mapping[str, tuple[int, str]],
) -> dict[str, Any]:
    """Return leader, front, diagnostics, rounds and a row per cell as plain containers.

    `gain` and `memory_gain` of a cell are log ratios of its throughput and peak memory to the leader's.

    Args:
        cells: of the race.
        labels: cell id -> its name.
        runs: that chose the leader.
        verdicts: after each round, oldest first.
        left: cell id -> block after which it left without being shown slower, and why.
    """
    rows: list[dict[str, Any]] = []
    drifts = _drifts(cells, runs)
    for number, entry in enumerate(cells.entries):
        blocks = runs.block[runs.cell == number].tolist()
        name = labels[entry.cell_id]
        if cells.settings.replicate:  # the cell stands for all its seeds
            name = re.sub(rf" ?\b{cells.settings.replicate}=\S+", "", name).strip() or "plain"
        row = {"cell_id": entry.cell_id, "name": name, "blocks": blocks}
        if number in drifts:
            row["drift"] = drifts[number]
        if entry.cell_id in left:
            row["left_after"], row["reason"] = left[entry.cell_id]
        elif (after := _dropped_after(verdicts, number)) is not None:
            row["dropped_after"] = after
        if verdicts:
            row["gain"] = float(verdicts[-1].gain[number])
            row["gain_sd"] = float(verdicts[-1].gain_sd[number])
            if (saving := verdicts[-1].memory_saving) is not None:
                row["memory_gain"] = float(-saving[number])
        rows.append(row)
    document = {"level": LEVEL, "num_blocks": runs.num_blocks, "cells": rows}
    if not verdicts:
        return document
    last = verdicts[-1]
    return document | {
        "leader": cells.entries[last.leader].cell_id,
        "runner_up": cells.entries[last.runner_up].cell_id,
        "baseline": cells.first_of(cells.entries[last.leader].baseline_id or "") or None,
        "front": [cells.entries[member].cell_id for member in last.front],
        "scales": vars(last.scales),
        "odd_runs": float(last.odd_runs.mean()),
        "rounds": [
            {
                "blocks": v.num_blocks,
                "runs": int(v.num_runs.sum()),
                "leader": cells.entries[v.leader].cell_id,
                "alive": int(v.alive.sum()),
                "chance_of_better": v.chance_of_better,
                "front": [cells.entries[member].cell_id for member in v.front],
            }
            for v in verdicts
        ],
    }


def _drifts(cells: RaceCells, runs: Runs) -> dict[int, float]:
    """Return the cells whose ratio to their baseline changed over the blocks, and by how much, log."""
    found: dict[int, tuple[float, float]] = {}
    for number, baseline in enumerate(cells.baselines):
        shared, own, of_baseline = np.intersect1d(
            runs.block[runs.cell == number], runs.block[runs.cell == baseline], return_indices=True
        )
        if number != baseline:
            ratio = (
                runs.log[runs.cell == number][own] - runs.log[runs.cell == baseline][of_baseline]
            )
            found[number] = drift(shared.astype(float), ratio)
    tested = {number: some for number, some in found.items() if some[0] == some[0]}
    return {n: change for n, (change, p) in tested.items() if p * len(tested) < DRIFT_LEVEL}


def _dropped_after(verdicts: Sequence[Verdict], number: int) -> int | None:
    """Return the blocks after which a cell was dropped for good; None where it still stands."""
    gone = list(takewhile(lambda verdict: not verdict.alive[number], reversed(verdicts)))
    return gone[-1].num_blocks if gone else None
