"""The rounds of `sweep.search=race`: from the stored runs of a sweep to the next blocks, or to the end.

What a race does next follows from the records alone, see `halving`: an interrupted race continues as
if it had not been. Nothing is read from `race.json`, which is for tables and charts.
"""

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, log, log1p
from typing import Any

import numpy as np
from pandas import DataFrame

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.errors import BadValueError
from vitsweep.extras.race.halving import LAST, LEVEL, Runs, Standing, standing, within_reach
from vitsweep.extras.race.table import RACE
from vitsweep.files import write_atomically
from vitsweep.planning.blocks import BalancedOrder, Block, runs_per_cell, seconds_of_block
from vitsweep.planning.pending import ResumeState, resume_state, usable_runs
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, all_refused, cell_labels
from vitsweep.results.record import CHOOSING, FRESH, STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count
from vitsweep.tables.stats import adjusted, estimate, interval

PEAKS = ("peak_allocated_gib", "peak_rss_gib")
"""Peak memory of a run's worst rank, on a GPU and on CPU."""
LEAST_CELLS = 2
GRID_BLOCKS = 5
"""Least blocks of a grid whose intervals one would publish."""
EXTRA_ROUNDS = 3
"""So many times the same cells are asked for without a run of them."""


@dataclass
class RaceRounds:
    """One race over the cells of a plan.

    Attributes:
        plan: the cells of the command with their baselines.
        settings: of the sweep.
        store: where the runs are.
        code: state of the code that would measure now.
        earlier: records that were in the store when the command began.
        ended: why no further cell is dropped, `halved`, `budget` or `alone`; empty while the race runs.
    """

    plan: SweepPlan
    settings: SweepSettings
    store: Store
    code: Mapping[str, Any]
    earlier: Sequence[RunRecord] = ()
    ended: str = ""
    is_bounded: bool = False

    def __post_init__(self) -> None:
        self._order = BalancedOrder.after(self.earlier)
        self._random = np.random.default_rng()
        self._end = time.monotonic() + 60 * (self.settings.minutes or inf)
        self._asked: tuple[int, int] = (-1, 0)
        self._num_fresh = 0

    @property
    def notice(self) -> str:
        """How many cells are not in the race because a rule refuses them; empty where none is."""
        refused = len(self.plan.entries) - len(self.plan.runnable)
        if not refused:
            return ""
        return (
            f"{refused:,} of {count(len(self.plan.entries), 'cell')} cannot run and are not in the race: "
            "`plan` in front of the command lists the reasons."
        )

    @cached_property
    def cells(self) -> Sequence[PlannedCell]:
        """The cells that can run, the baseline of most of them first."""
        runnable = list(self.plan.runnable)
        bases = Counter(e.baseline_id for e in runnable if e.baseline_id)
        return sorted(runnable, key=lambda e: -bases[e.cell_id])

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Cell id -> index in `cells`."""
        return {entry.cell_id: n for n, entry in enumerate(self.cells)}

    @cached_property
    def grid_blocks(self) -> int:
        """Blocks of the full grid that a race is compared with."""
        return max(GRID_BLOCKS, *(e.spec.measurement.blocks for e in self.cells))

    @cached_property
    def grid_runs(self) -> int:
        """Runs of that grid, those of baselines among them."""
        missing = {e.cell_id: self.grid_blocks for e in self.cells if not e.is_added_baseline}
        return runs_per_cell(self.plan, missing, self.settings.cells_per_block).total()

    @staticmethod
    def problems(settings: SweepSettings) -> list[str]:
        """Say which settings of a sweep do not go with a race."""
        unfit = {
            "sweep.limit.key": settings.limit.key,
            "sweep.max_gpu_hours": settings.max_gpu_hours,
            "sweep.replicate": settings.replicate,
            "sweep.accept_code": None if settings.accept_code == "same" else settings.accept_code,
        }
        found = [
            f"`{key}={value}` does not go with `sweep.search=race`: leave out one of them."
            for key, value in unfit.items()
            if value is not None
        ]
        if settings.cells_per_block < LEAST_CELLS:
            found.append(
                f"`sweep.cells_per_block={settings.cells_per_block}` must be at least 2 in a race, which "
                "compares the cells of a block with one another."
            )
        return found

    def check(self) -> None:
        """Refuse a race that cannot begin.

        Raises:
            BadValueError: there is one cell only.
            ImpossibleCellError: every cell is refused.
        """
        if not self.cells:
            raise all_refused(self.plan)
        if len(self.cells) < LEAST_CELLS:
            raise BadValueError(
                "`sweep.search=race` has one cell: a race needs two cells or more, such as "
                "`-m precision=O1,O2 sharding=ddp,fsdp`."
            )

    @property
    def outlook(self) -> str:
        """How the race would proceed, for `plan`.

        Raises:
            BadValueError: it could not begin.
        """
        self.check()
        settings, num = self.settings, len(self.cells)
        bound = f" for {settings.minutes:g} min" if settings.minutes else ""
        return (
            f"Race of {count(num, 'cell')} in blocks of up to {min(settings.cells_per_block, num)} "
            f"runs{bound}: each runs once, then the slower half is dropped, round after round, down to "
            f"{LAST}; then {settings.confirm} fresh blocks of leader, runner-up and baseline. The column "
            f"`runs` is that of a grid; one of {self.grid_blocks} blocks takes {self.grid_runs:,} runs."
        )

    def next(self, records: Sequence[RunRecord]) -> list[Block]:
        """Return the next blocks; none where the race has ended, and `ended` says why.

        Writes `race.json`.

        Args:
            records: those that this command has added, oldest first.
        """
        used, out = self._used(records), self._out(records)
        at = self._standing(used, out)
        blocks = self._choosing(at, out, [*self.earlier, *records])
        if not blocks:
            self.ended = (
                "budget" if at and at.lacking else "halved" if at and len(at.best) > 1 else "alone"
            )
            blocks = self._fresh(at, used)
        self._write(at, used, out)
        return blocks

    def stopped(self, records: Sequence[RunRecord]) -> None:
        """Write `race.json` after an interruption, when no further block is wanted."""
        used, out = self._used(records), self._out(records)
        self.ended = ""
        self._write(self._standing(used, out), used, out)

    def state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Return what is known of the cells, see `planning.pending`."""
        return resume_state(
            self.plan, self.earlier, self.settings, self.code["packages"]["torch"], records
        )

    def num_runs(self, records: Sequence[RunRecord]) -> "Counter[str]":
        """Return nothing: which cells run again is known after each round."""
        return Counter()

    def to_resume(self) -> tuple[Mapping[str, int], int]:
        """Return one block, of a cell and its baseline, for each cell that is repeated at all."""
        ended = self.state(()).not_measured
        return {e.cell_id: 1 for e in self.plan.runnable if e.cell_id not in ended}, 1

    def _used(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """Return the runs that count, oldest first."""
        earlier = () if self.settings.remeasure else self.earlier
        version = self.code["packages"]["torch"]
        return usable_runs([*earlier, *records], self.plan, version, accepts_any_code=False).own

    def _out(self, records: Sequence[RunRecord]) -> dict[str, str]:
        """Return the cells that are not measured further, and why."""
        found = {c: f"{r.status}: {r.reason}" for c, r in self.state(records).not_measured.items()}
        for run in self._used(records):
            if why := self._unfit(run):
                found.setdefault(run.cell_id, why)
        return {cell_id: why for cell_id, why in found.items() if cell_id in self.number}

    def _unfit(self, run: RunRecord) -> str:
        """Return why a measured run takes its cell out of the race; "" where it does not."""
        limit = self.settings.memory_limit_gib
        peak = next((float(p) for column in PEAKS if (p := run.metrics.get(column))), 0.0)
        if run.status != Status.measured:
            return ""
        if limit is not None and peak > limit:
            return f"used {peak:.3g} GiB, more than sweep.memory_limit_gib={limit:g}"
        return "" if (run.metrics.get("images_per_second") or 0.0) > 0 else "no step was counted"

    def _runs(self, records: Iterable[RunRecord]) -> Runs:
        """Return the measured runs as numbers: the log of images per second, or of those per rank."""
        good = [r for r in records if r.status == Status.measured and not self._unfit(r)]
        logs = [log(r.metrics["images_per_second"]) - self._log_price(r.cell_id) for r in good]  # type: ignore[arg-type]
        cells = np.array([self.number[run.cell_id] for run in good], np.int64)
        return Runs(cells, np.array([run.block for run in good], str), np.array(logs, float))

    def _log_price(self, cell_id: str) -> float:
        is_per_cost = self.settings.rank_by == "throughput_per_cost"
        return log(self.plan.entries[cell_id].spec.resources.world_size) if is_per_cost else 0.0

    def _standing(self, used: Sequence[RunRecord], out: Mapping[str, str]) -> Standing | None:
        """Return how far the halving came; None where no cell is left."""
        gone = np.array([entry.cell_id in out for entry in self.cells])
        if gone.all():
            return None
        references = range(int(np.argmin(gone)) + 1)
        return standing(self._runs(r for r in used if r.purpose != FRESH), gone, references)

    def _choosing(
        self, at: Standing | None, out: Mapping[str, str], records: Sequence[RunRecord]
    ) -> list[Block]:
        """Return the next block of this round, if the budget allows it.

        The first block of all runs in any case, since nothing says how long its runs take.
        """
        if at is None or not at.lacking or len(out) + 1 >= len(self.cells):
            return []
        num_runs = len(at.runs.log)
        self._asked = num_runs, (self._asked[1] + 1 if self._asked[0] == num_runs else 0)
        if self._asked[1] > EXTRA_ROUNDS:
            return []
        reference = next(n for n, e in enumerate(self.cells) if e.cell_id not in out)
        size, cells = self.settings.cells_per_block - 1, self._random.permutation(at.lacking)
        parts = np.array_split(cells, ceil(len(cells) / size))
        block = self._block([reference, *parts[0].tolist()], CHOOSING)
        fresh = Block("", tuple(self.cells[n] for n in (at.best or [reference])[:LAST]))
        reserved = self.settings.confirm * seconds_of_block(fresh, records)
        end = self._end - min(reserved, 30 * (self.settings.minutes or inf))
        in_time = time.monotonic() + seconds_of_block(block, records) <= end
        return [block] if in_time or not num_runs else []

    def _block(self, cells: Sequence[int], purpose: str) -> Block:
        ordered = self._order.next_block([self.cells[n].cell_id for n in dict.fromkeys(cells)])
        entries = tuple(self.plan.entries[cell_id] for cell_id in ordered)
        return Block(secrets.token_hex(5), entries, purpose=purpose)

    # The fresh blocks at the end of a race, which measure what it chose and never choose.

    def _chosen(self, at: Standing | None) -> list[int]:
        """Return leader, runner-up, the leader's baseline and the reference; [] where none is left."""
        if at is None or len(at.best) < LEAST_CELLS:
            return []
        base = self.number.get(self.cells[at.best[0]].baseline_id or "")
        is_there = base is not None and base in at.runs.cell
        reference = [c for c in at.best if c == self._reference(at)]
        return list(dict.fromkeys([*at.best[:2], *([base] if is_there else []), *reference]))  # type: ignore[list-item]

    def _reference(self, at: Standing) -> int:
        """Return the cell that is in all blocks: the first that is still in the race."""
        return min(at.best)

    def _fresh(self, at: Standing | None, used: Sequence[RunRecord]) -> list[Block]:
        """Return the next fresh block that is still to run.

        Blocks in which a cell was not measured are repeated, half as many as are wanted at most. Blocks that
        were stopped from outside do not count: a later command begins them anew.
        """
        chosen, wanted = self._chosen(at), self.settings.confirm
        ids = {self.cells[n].cell_id for n in chosen}
        num_complete = num_failed = 0
        for runs in self._fresh_blocks(used, chosen).values():
            is_complete = {r.cell_id for r in runs if r.status == Status.measured} == ids
            ended = (Status.measured, *STOPPED_FROM_OUTSIDE)
            num_complete += is_complete
            num_failed += not is_complete and any(run.status not in ended for run in runs)
        num_tried = max(self._num_fresh, num_complete + num_failed)
        num = min(wanted - num_complete, wanted + ceil(wanted / 2) - num_tried)
        if not chosen or num <= 0:
            return []
        self._num_fresh += 1
        return [self._block(chosen, FRESH)]

    def _fresh_blocks(
        self, used: Sequence[RunRecord], chosen: Sequence[int]
    ) -> dict[str, list[RunRecord]]:
        """Return the runs of each fresh block of these cells, whichever command began it."""
        fresh: dict[str, list[RunRecord]] = {}
        for run in used:
            if run.purpose == FRESH:
                fresh.setdefault(run.block, []).append(run)
        ids = {self.cells[n].cell_id for n in chosen}
        return {b: runs for b, runs in fresh.items() if {r.cell_id for r in runs} <= ids}

    def _ratios(self, runs: Runs, chosen: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Return the leader's ratios to the others over the fresh blocks alone, by the id of the other cell.

        Intervals are of Student's t, at the level at which Holm's method tests each ratio.
        """
        at = {(b, c): y for c, b, y in zip(runs.cell, runs.block, runs.log, strict=True)}
        rows = [
            (self.cells[other].cell_id, at[block, chosen[0]] - at[block, other])
            for other in chosen[1:]
            for block in dict.fromkeys(runs.block.tolist())
            if {(block, chosen[0]), (block, other)} <= at.keys()
        ]
        table = estimate(DataFrame(rows, columns=["cell_id", "log_ratio"]))
        level = adjusted(table["p_value"].to_numpy(float, na_value=np.nan))[1]
        ends = interval(table, table["p_value"] * 0 + level)
        table = table.assign(speedup_low=ends["low"], speedup_high=ends["high"])
        columns = ["speedup", "speedup_low", "speedup_high", "num_blocks"]
        found = table.set_index("cell_id")[columns].astype(float)
        return {str(c): {str(k): v for k, v in row.dropna().items()} for c, row in found.iterrows()}

    # What tables and charts read.

    def _write(
        self, at: Standing | None, used: Sequence[RunRecord], out: Mapping[str, str]
    ) -> None:
        document = self._document(at, used, out)
        text = json.dumps(document, separators=(",", ":"))
        write_atomically(self.store.root / RACE, text, durable=True)

    def _document(
        self, at: Standing | None, used: Sequence[RunRecord], out: Mapping[str, str]
    ) -> dict[str, Any]:
        labels, settings = cell_labels(self.plan), self.settings
        known: list[str] = list(dict.fromkeys(at.runs.block.tolist())) if at else []
        rows = []
        for n, entry in enumerate(self.cells):
            blocks = [known.index(b) for b in at.runs.block[at.runs.cell == n]] if at else []
            row: dict[str, Any] = {
                "cell_id": entry.cell_id,
                "name": labels[entry.cell_id],
                "blocks": blocks,
            }
            if entry.cell_id in out:
                row["reason"] = out[entry.cell_id]
            elif at and n in at.dropped:
                row["dropped_after"] = at.dropped[n]
            if at and blocks and at.best:
                row["gain"] = float(at.mean[n] - at.mean[at.best[0]])
            rows.append(row)
        document = {
            "ended": self.ended,
            "rank_by": settings.rank_by,
            "indifference": settings.indifference,
            "error": LEVEL,
            "num_blocks": len(known),
            "num_runs": len(used),
            "seconds": sum(float(r.environment.get("run_seconds") or 0.0) for r in used),
            "grid_runs": self.grid_runs,
            "grid_blocks": self.grid_blocks,
            "cells": rows,
        }
        if at is None or not at.best:
            return document
        chosen = self._chosen(at)
        fresh = self._runs(r for runs in self._fresh_blocks(used, chosen).values() for r in runs)
        return document | {
            "leader": self.cells[at.best[0]].cell_id,
            "runner_up": self.cells[chosen[1]].cell_id if chosen else None,
            "baseline": self.cells[at.best[0]].baseline_id,
            "confirmed": self._ratios(fresh, chosen) if chosen else {},
            "open": [self.cells[n].cell_id for n in self._open(at, fresh, out)],
        }

    def _open(self, at: Standing, fresh: Runs, out: Mapping[str, str]) -> list[int]:
        """Return the cells that may be faster than the leader by more than the indifference.

        These are all others as long as one has to run once more; then those that `within_reach` finds.
        """
        leader, *after = at.best
        others = [
            n for n, e in enumerate(self.cells) if n not in at.best[:2] and e.cell_id not in out
        ]
        reference = self._reference(at)
        if at.lacking or not {leader, reference} <= set(fresh.cell.tolist()):
            return [*after[:1], *others]
        margin = log1p(self.settings.indifference)
        return within_reach(at, leader, others, fresh, reference, margin)
