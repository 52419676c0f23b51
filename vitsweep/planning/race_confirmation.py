"""The fresh blocks at the end of a race, which measure what it chose and never choose."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log
from typing import Any

from pandas import DataFrame

from vitsweep.planning.race_cells import RaceCells, peak_gib
from vitsweep.racing.rules import Verdict
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.tables.ratios import estimate

LEAST_CELLS = 2


@dataclass
class Confirmation:
    """Fresh blocks of the leader, its baseline and the runner-up, or of a Pareto front and its baseline.

    Attributes:
        cells: of the race.
        known: what was confirmed so far: leader, runner-up, front, and the names of the blocks.
    """

    cells: RaceCells
    known: list[dict[str, Any]] = field(default_factory=list)
    _num_begun: int = 0

    @property
    def blocks(self) -> set[str]:
        """Names of all fresh blocks."""
        return {name for some in self.known for name in some["blocks"]}

    def next(
        self, verdict: Verdict | None, used: Sequence[RunRecord], left: Mapping[str, Any]
    ) -> tuple[str, list[str]] | None:
        """Return the name and the cells of the next fresh block; None where there is none to run.

        Blocks in which a cell was not measured are repeated, half as many as are wanted at most. Blocks
        that were stopped from outside, with the command or without it, do not count: a later command
        begins them anew.

        Args:
            verdict: after all runs that may choose.
            used: runs that count, oldest first.
            left: cells that are out of the race.
        """
        confirmed, wanted = self._confirmed(verdict, left), self.cells.settings.confirm
        if confirmed is None:
            return None
        chosen, found = confirmed
        measured = {
            (run.block, self.cells.first_of(run.cell_id))
            for run in used
            if run.status == Status.measured
        }
        complete = [name for name in found["blocks"] if all((name, c) in measured for c in chosen)]
        failed = {
            run.block
            for run in used
            if run.status not in (Status.measured, *STOPPED_FROM_OUTSIDE)
            and run.block in found["blocks"]
        }
        attempts = wanted + ceil(wanted / 2)
        num_tried = max(self._num_begun, len(failed.union(complete)))
        if len(complete) >= wanted or num_tried >= attempts:
            return None
        self._num_begun += 1
        name = secrets.token_hex(5)
        found["blocks"].append(name)
        if found not in self.known:
            self.known.append(found)
        return name, chosen

    def ratios(
        self, verdict: Verdict | None, used: Sequence[RunRecord], left: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return ratios over the fresh blocks alone, with their 95 % intervals.

        Returns:
            Of a race for one figure: the leader's to the baseline and to the runner-up, by the id of
            the other cell. Of a race for a front: each member's to the baseline (the fastest member
            where there is none), by the id of the member, with `memory`, the ratio of peak memory.
        """
        confirmed = self._confirmed(verdict, left)
        if confirmed is None:
            return {}
        (leader, *others), found = confirmed
        pairs = {other: (leader, other) for other in others}
        if self.cells.settings.is_front:
            reference = found["baseline"] or leader
            pairs = {c: (c, reference) for c in (leader, *others) if c != reference}
        values, peaks = {}, {}
        for run in used:
            if run.block in found["blocks"] and len(measured := self.cells.runs([run]).log):
                key = run.block, self.cells.first_of(run.cell_id)
                values[key], peaks[key] = float(measured[0]), peak_gib(run)
        ratios = {}
        for name, (a, b) in pairs.items():
            both = [k for k in found["blocks"] if {(k, a), (k, b)} <= values.keys()]
            if not both:
                continue
            logs = [values[k, a] - values[k, b] for k in both]
            table = estimate(DataFrame({"cell_id": a, "log_ratio": logs}))
            columns = ("speedup", "speedup_low", "speedup_high")
            ratios[name] = {"num_blocks": len(both), **{c: _number(table[c][0]) for c in columns}}
            if self.cells.settings.is_front:
                memory = sum(log(peaks[k, a] / peaks[k, b]) for k in both) / len(both)
                ratios[name]["memory"] = exp(memory)
        return ratios

    def _confirmed(
        self, verdict: Verdict | None, left: Mapping[str, Any]
    ) -> tuple[list[str], dict[str, Any]] | None:
        """Return the cells of a fresh block, leader first, and what is known of these blocks."""
        if verdict is None or not self.cells.settings.confirm:
            return None
        ids = [entry.cell_id for entry in self.cells.entries]
        leader, runner_up = ids[verdict.leader], ids[verdict.runner_up]
        baseline = self.cells.first_of(self.cells.entries[verdict.leader].baseline_id or "")
        front = [ids[member] for member in verdict.front]
        chosen = [leader, *front, baseline] if front else [leader, baseline, runner_up]
        chosen = [c for c in dict.fromkeys(chosen) if c in self.cells.number and c not in left]
        if len(chosen) < LEAST_CELLS or leader not in chosen:
            return None
        key: dict[str, Any] = {"leader": leader, "runner_up": runner_up}
        if front:
            key |= {"front": front, "baseline": baseline if baseline in chosen else ""}
        known = [some for some in self.known if key.items() <= some.items()]
        return chosen, (known[-1] if known else {**key, "blocks": []})


def _number(value: Any) -> float | None:
    return float(value) if value == value else None
