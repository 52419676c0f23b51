"""The rounds of `sweep.search=race`: from the stored runs of a sweep to the next blocks, or to the end.

What a race does next follows from the records alone, see `racing.conclusions.Race`: an interrupted race
continues as if it had not been. Of `race.json`, which tables and charts read, two things are read again:
the names of the fresh blocks, since these never choose the leader, and the predictions with which the
race began.
"""

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import ceil, exp, log
from typing import Any

import numpy as np
from pandas import DataFrame

from vitsweep.composition.sweep_settings import TIME_TO_ACCURACY, SweepSettings
from vitsweep.errors import BadValueError
from vitsweep.planning.blocks import BalancedOrder, Block, runs_per_cell
from vitsweep.planning.pending import ResumeState, resume_state, usable_runs
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, all_refused, cell_labels
from vitsweep.racing.cells import RaceCells, peak_gib, seconds_of, state_of_race, write_race
from vitsweep.racing.conclusions import NEVER, Phase, Race, Step, Verdict
from vitsweep.results.record import CHOOSING, FRESH, STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import read_race
from vitsweep.tables.formatting import count
from vitsweep.tables.stats import estimate

# The fresh blocks at the end of a race, which measure what it chose and never choose.


LEAST_CELLS = 2


@dataclass
class Confirmation:
    """Fresh blocks of the leader, its baseline and the runner-up, or of a Pareto front and its baseline.

    Attributes:
        cells: of the race.
    """

    cells: RaceCells
    _num_begun: int = 0

    def next(
        self, verdict: Verdict | None, used: Sequence[RunRecord], left: Mapping[str, Any]
    ) -> list[str]:
        """Return the cells of the next fresh block, leader first; none where there is none to run.

        Blocks in which a cell was not measured are repeated, half as many as are wanted at most. Blocks
        that were stopped from outside, with the command or without it, do not count: a later command
        begins them anew.

        Args:
            verdict: after all runs that may choose.
            used: runs that count, oldest first.
            left: cells that are out of the race.
        """
        chosen, wanted = self._chosen(verdict, left), self.cells.settings.confirm
        num_complete = num_failed = 0
        for runs in self._blocks(chosen, used).values():
            measured = {self.cells.first_of(r.cell_id) for r in runs if r.status == Status.measured}
            ended = (Status.measured, *STOPPED_FROM_OUTSIDE)
            num_complete += measured == {*chosen}
            num_failed += measured != {*chosen} and any(run.status not in ended for run in runs)
        num_tried = max(self._num_begun, num_complete + num_failed)
        if not chosen or num_complete >= wanted or num_tried >= wanted + ceil(wanted / 2):
            return []
        self._num_begun += 1
        return chosen

    def ratios(
        self, verdict: Verdict | None, used: Sequence[RunRecord], left: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return ratios over the fresh blocks alone, with their 95 % intervals.

        Returns:
            Of a race for one figure: the leader's to the baseline and to the runner-up, by the id of
            the other cell. Of a race for a front: each member's to the baseline (the fastest member
            where there is none), by the id of the member, with `memory`, the ratio of peak memory.
        """
        if verdict is None or not (chosen := self._chosen(verdict, left)):
            return {}
        leader, *others = chosen
        pairs = {other: (leader, other) for other in others}
        if self.cells.settings.is_front:
            baseline = self._baseline(verdict)
            reference = baseline if baseline in chosen else leader
            pairs = {c: (c, reference) for c in chosen if c != reference}
        values: dict[tuple[str, str], float] = {}
        peaks: dict[tuple[str, str], float] = {}
        blocks = self._blocks(chosen, used)
        for run in (run for runs in blocks.values() for run in runs):
            if len(measured := self.cells.runs([run]).log):
                key = run.block, self.cells.first_of(run.cell_id)
                values[key], peaks[key] = float(measured[0]), peak_gib(run)
        ratios = {}
        for name, (a, b) in pairs.items():
            both = [k for k in blocks if {(k, a), (k, b)} <= values.keys()]
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

    def _chosen(self, verdict: Verdict | None, left: Mapping[str, Any]) -> list[str]:
        """Return the cells of a fresh block, leader first; none where nothing is to be confirmed."""
        if verdict is None or not self.cells.settings.confirm:
            return []
        ids = [entry.cell_id for entry in self.cells.entries]
        leader, front = ids[verdict.leader], [ids[member] for member in verdict.front]
        rest = (
            [*front, self._baseline(verdict)]
            if front
            else [self._baseline(verdict), ids[verdict.runner_up]]
        )
        chosen = [
            c for c in dict.fromkeys([leader, *rest]) if c in self.cells.number and c not in left
        ]
        return chosen if len(chosen) >= LEAST_CELLS and leader in chosen else []

    def _baseline(self, verdict: Verdict) -> str:
        return self.cells.first_of(self.cells.entries[verdict.leader].baseline_id or "")

    def _blocks(
        self, chosen: Sequence[str], used: Sequence[RunRecord]
    ) -> dict[str, list[RunRecord]]:
        """Return the runs of each fresh block of these cells, whichever command began it."""
        fresh: dict[str, list[RunRecord]] = {}
        for run in used:
            if run.purpose == FRESH:
                fresh.setdefault(run.block, []).append(run)
        first = self.cells.first_of
        return {
            b: runs for b, runs in fresh.items() if {first(r.cell_id) for r in runs} <= {*chosen}
        }


def _number(value: Any) -> float | None:
    return float(value) if value == value else None


START_UP_SECONDS = 1.0
"""Least time in which a run starts its processes, for a budget that is too small for anything."""
GRID_BLOCKS = 5
"""Least blocks of a grid whose intervals one would publish."""


@dataclass
class RaceRounds:
    """One race over the cells of a plan.

    Attributes:
        plan: the cells of the command with their baselines.
        settings: of the sweep.
        store: where the runs are.
        code: state of the code that would measure now.
        earlier: records that were in the store when the command began.
        at_once: blocks of a round at least.
        predicted: cell id -> log of its predicted throughput, of all cells that can run or of none.
        ended: why no further block is run; empty while the race runs.
    """

    plan: SweepPlan
    settings: SweepSettings
    store: Store
    code: Mapping[str, Any]
    earlier: Sequence[RunRecord] = ()
    at_once: int = 1
    predicted: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""
    is_bounded: bool = False
    left_out: Sequence[PlannedCell] = ()
    _step: Step = field(default_factory=lambda: Step(Phase.start))

    def __post_init__(self) -> None:
        stored = read_race(self.store.root)
        raced = {cell["cell_id"] for cell in stored.get("cells", ())}
        entries = RaceCells.of(self.plan, self.settings, {}).entries
        if raced and {entry.cell_id for entry in entries} <= raced:
            # a race that began without predictions goes on without them, even where there are some now
            self.predicted = stored.get("predicted", {})
        self._confirmation = Confirmation(self.cells)
        self._order = BalancedOrder.after(self.earlier)
        self._num_blocks = len({run.block for run in self.earlier})

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
    def cells(self) -> RaceCells:
        """The cells that can run."""
        return RaceCells.of(self.plan, self.settings, self.predicted)

    @cached_property
    def race(self) -> Race:
        """The statistics of the race; its random numbers depend on the cells alone."""
        ids = " ".join(sorted(self.cells.number))
        return Race(
            design=self.cells.design,
            baseline_of=self.cells.baselines,
            block_size=self.settings.cells_per_block,
            indifference=self.settings.indifference,
            seed=int(sha256(ids.encode()).hexdigest()[:12], 16),
            at_once=self.at_once,
            starts_with_all=self.settings.start == "every_cell",
        )

    @cached_property
    def grid_blocks(self) -> int:
        """Blocks of the full grid that a race is compared with."""
        return max(GRID_BLOCKS, *(e.spec.measurement.blocks for e in self.cells.entries), 0)

    @cached_property
    def grid_runs(self) -> int:
        """Runs of that grid, those of baselines among them."""
        named = [e.cell_id for e in self.cells.entries if not e.is_added_baseline]
        missing = dict.fromkeys(named, self.grid_blocks)
        return runs_per_cell(self.plan, missing, self.settings.cells_per_block).total()

    @cached_property
    def budget(self) -> tuple[str, float] | None:
        """The setting that bounds the race, as typed, and seconds of all blocks; None without one.

        Minutes are of this command, beyond what earlier ones took; hours of devices are of the race.
        """
        ranks = max(entry.spec.resources.world_size for entry in self.cells.entries)
        minutes, hours = self.settings.minutes, self.settings.max_gpu_hours
        found = []
        if minutes is not None:
            before = seconds_of(self._records(()))
            found.append((f"sweep.minutes={minutes:g}", 60 * minutes + before))
        if hours is not None:
            found.append((f"sweep.max_gpu_hours={hours:g}", 3600 * hours / ranks))
        return min(found, key=lambda bound: bound[1], default=None)

    def check(self) -> None:
        """Refuse a race that cannot begin.

        Raises:
            BadValueError: there is one cell only, the budget of a race without runs is too small for one
                block, or cells have no target accuracy to reach.
            ImpossibleCellError: every cell is refused.
        """
        if not self.cells.entries:
            raise all_refused(self.plan)
        if len(self.cells.entries) < LEAST_CELLS:
            raise BadValueError(
                "`sweep.search=race` has one cell: a race needs two cells or more, such as "
                "`-m precision=O1,O2 sharding=ddp,fsdp`."
            )
        if self.settings.speed == TIME_TO_ACCURACY:
            self._check_target()
        used = self._records(())
        if self.budget is None or used:  # with runs there is a result to show
            return
        typed, seconds = self.budget
        size = min(self.race.block_size, len(self.cells.entries))
        needed = size * self._seconds_of_run(used)
        if seconds < needed:
            raise BadValueError(
                f"`{typed}` is too small for one block: {size} runs take "
                f"about {needed / 60:.2g} min. Give more, or shorten runs (`measurement=smoke`)."
            )

    def _check_target(self) -> None:
        tasks = [entry.spec.task for entry in self.cells.entries]
        if not all(task.epochs and task.target_accuracy for task in tasks):
            raise BadValueError(
                "`sweep.objective=time_to_accuracy` needs `task=train` and an accuracy to reach, such as "
                "`task.target_accuracy=0.9`, in every cell."
            )

    def next(self, records: Sequence[RunRecord]) -> list[Block]:
        """Return the next blocks; none where the race has ended, and `ended` says why.

        Writes `race.json`.

        Args:
            records: those that this command has added, oldest first.
        """
        used = self._records(records)
        step, left = self._judged(used, records)
        self._step = step
        blocks: list[Block] = []
        if step.phase in (Phase.start, Phase.race):
            wanted = [[self.cells.entries[c].cell_id for c in cells] for cells in step.blocks]
            blocks = [self._block(cells, CHOOSING) for cells in self._affordable(wanted, used)]
            self.ended = "" if blocks else "budget"
            if self.ended and not step.verdicts:  # within the start: who leads is said nevertheless
                self._step = self._early(used, left)
        else:
            self.ended = str(step.phase)
        if self.ended:
            fresh = self._confirmation.next(self._step.verdict, used, left)
            blocks = [self._block(fresh, FRESH)] if fresh else []
        write_race(self.store.root, self._document(used, left))
        return blocks

    def stopped(self, records: Sequence[RunRecord]) -> None:
        """Write `race.json` after an interruption, when no further block is wanted."""
        used = self._records(records)
        step, left = self._judged(used, records)
        self._step = step if step.verdicts else self._early(used, left)
        self.ended = ""
        write_race(self.store.root, self._document(used, left))

    def state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Return what is known of the cells, see `planning.pending`."""
        return resume_state(self.plan, self.earlier, self.settings, self.code, records)

    def num_runs(self, records: Sequence[RunRecord]) -> "Counter[str]":
        """Return nothing: a race does not know how long it takes."""
        return Counter()

    def to_resume(self) -> tuple[Mapping[str, int], int]:
        """Return one block, of a cell and its baseline, for each cell that is repeated at all."""
        ended = self.state(()).not_measured
        return {e.cell_id: 1 for e in self.plan.runnable if e.cell_id not in ended}, 1

    def _records(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """Return the runs that count, oldest first."""
        torch_version = self.code["packages"]["torch"]
        earlier = () if self.settings.remeasure else self.earlier
        used = usable_runs([*earlier, *records], self.plan, torch_version, accepts_any_code=False)
        return used.own

    def _judged(
        self, used: Sequence[RunRecord], records: Sequence[RunRecord]
    ) -> tuple[Step, dict[str, tuple[int, str]]]:
        choosing = self._choosing(used)
        left = self.cells.left(choosing, self.state(records).not_measured)
        return self.race.next(self.cells.runs(choosing), self.cells.left_numbers(left)), left

    def _early(self, used: Sequence[RunRecord], left: Mapping[str, tuple[int, str]]) -> Step:
        """Return what the runs of an unfinished start say: who leads, but of no cell that it is slower."""
        runs = self.cells.runs(self._choosing(used))
        if len(set(runs.cell.tolist())) < LEAST_CELLS:
            return self._step
        numbers = self.cells.left_numbers(left)
        [verdict] = self.race.verdicts(runs, numbers)
        verdict = replace(verdict, alive=numbers == NEVER, is_settled=False)
        return Step(Phase.start, verdicts=[verdict])

    def _choosing(self, used: Sequence[RunRecord]) -> list[RunRecord]:
        """Return the runs that may choose the leader: all but those of fresh blocks."""
        return [run for run in used if run.purpose != FRESH]

    def _block(self, cells: Sequence[str], purpose: str) -> Block:
        turn, self._num_blocks = self._num_blocks, self._num_blocks + 1
        seeded = [self.cells.with_seed(cell_id, turn).cell_id for cell_id in cells]
        entries = tuple(self.plan.entries[c] for c in self._order.next_block(seeded))
        return Block(secrets.token_hex(5), entries, purpose=purpose)

    def _affordable(
        self, wanted: Sequence[Sequence[str]], used: Sequence[RunRecord]
    ) -> Sequence[Sequence[str]]:
        """Return the blocks that the budget allows, with the confirmation after them.

        The first block of all runs in any case, since nothing says how long its runs take.
        Without a budget in minutes a race ends where it has cost what the full grid costs, the
        confirmation not counted.
        """
        if self.budget is None:
            room = self.grid_runs - len(self._choosing(used))
            sizes = np.cumsum([len(block) for block in wanted])
            return [
                block for block, end in zip(wanted, sizes, strict=True) if end <= room or not used
            ]
        budget, per_run = self.budget[1], self._seconds_of_run(used)
        verdict = self._step.verdict
        size = len(verdict.front) + 1 if verdict and verdict.front else 3  # of a fresh block
        reserved = min(size * self.settings.confirm * per_run, budget / 2)
        left = budget - seconds_of(used) - reserved
        kept = []
        for block in wanted:
            left -= len(block) * per_run
            if left < 0 and used:
                break
            kept.append(block)
            if not used:  # how long runs take is known after the first block
                break
        return kept

    def _seconds_of_run(self, used: Sequence[RunRecord]) -> float:
        if used and (spent := seconds_of(used)):
            return spent / len(used)
        measurement = self.cells.entries[0].spec.measurement
        return START_UP_SECONDS + measurement.min_seconds + measurement.warmup_min_seconds

    def _document(
        self, used: Sequence[RunRecord], left: Mapping[str, tuple[int, str]]
    ) -> dict[str, Any]:
        """Return what `race.json` says."""
        runs, settings = self.cells.runs(self._choosing(used)), self.settings
        return {
            "ended": self.ended,
            "objective": settings.objective,
            "indifference": settings.indifference,
            "memory_limit_gib": settings.memory_limit_gib,
            "budget": self.budget[0] if self.budget else None,
            "budget_seconds": self.budget[1] if self.budget else None,
            "seeds": self.cells.seeds,
            "seconds": seconds_of(used),
            "num_runs": len(used),
            "num_start_blocks": self.race.num_start_blocks,
            "grid_runs": self.grid_runs,
            "grid_blocks": self.grid_blocks,
            "predicted": dict(self.predicted),
            "confirmed": self._confirmation.ratios(self._step.verdict, used, left),
            **state_of_race(self.cells, cell_labels(self.plan), runs, self._step.verdicts, left),
        }


# What `plan` says of a race: how it would proceed, and what it costs at most.


def describe_race(rounds: RaceRounds) -> str:
    """Return how a race would proceed, for `plan`.

    Raises:
        BadValueError: it could not begin.
    """
    rounds.check()
    race, settings = rounds.race, rounds.settings
    size, num = race.block_size, len(rounds.cells.entries)
    done = seconds_of(rounds.earlier)
    bound = f"at most {count(rounds.grid_runs, 'run')}, as many as the full grid takes"
    if rounds.budget is not None:
        typed, seconds = rounds.budget
        bound = f"as many blocks as {typed} allows"
        if done:
            per_run = done / len(rounds.earlier)
            more = max(0, int((seconds - done) / per_run))
            bound += f", about {count(more, 'more run')} of {per_run:.2g} s"
    sought = "leader, baseline and the cells most likely to beat them"
    fresh = "leader, baseline and runner-up"
    if settings.is_front:
        sought = "leader, baseline and cells that may belong to the front, beside members of it"
        fresh = "the front and its baseline"
    return (
        f"Race of {count(num, 'cell')} in blocks of up to {min(size, num)} runs: first "
        f"{race.num_start_blocks} that cover cells at random, then each with {sought}; {bound}; then "
        f"{settings.confirm} fresh blocks of {fresh}. The column `runs` is that of a grid; a full one of "
        f"{rounds.grid_blocks} blocks takes {rounds.grid_runs:,} runs."
    )
