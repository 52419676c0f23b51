"""Rounds: which blocks a command runs next, from what is measured by then."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from pandas import DataFrame

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.planning.blocks import (
    BalancedOrder,
    Block,
    block_of,
    describe_least_blocks,
    members_of_blocks,
    repeated_runs,
    runs_per_cell,
    screenings,
    seconds_of_block,
)
from vitsweep.planning.pending import ResumeState, resume_state, usable_runs
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord
from vitsweep.spec.measurement import MIN_BLOCKS
from vitsweep.tables.formatting import count
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.stats import SHOWN, Claim

EXTRA_ROUNDS = 3
"""So many rounds more than planned make up for pairs that were lost to runs that were stopped."""


class Rounds(Protocol):
    """Chooses the blocks of a command; `records` are those that the command has added, oldest first."""

    earlier: Sequence[RunRecord]
    """Records that were in the store when the command began."""
    is_bounded: bool
    """The command looks at its intervals between blocks, and stops by them or by its time."""

    @property
    def notice(self) -> str:
        """What is to be known before the first block, or ""."""

    def next(self, records: Sequence[RunRecord]) -> Sequence[Block]:
        """Return the blocks to run next; none where the command is done."""

    def state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Return what is measured and what is missing."""

    def num_runs(self, records: Sequence[RunRecord]) -> "Counter[str]":
        """Return cell id -> runs still to come, as far as that is known beyond the next blocks."""

    def to_resume(self) -> tuple[Mapping[str, int], int]:
        """Return the blocks in which interrupted trainings may go on.

        Returns:
            Cell id -> number of blocks, and the cells of such a block besides its baseline.
        """

    def stopped(self, records: Sequence[RunRecord]) -> None:
        """Note how far the command came; called where the user has stopped it."""


class AddedRounds(Rounds, Protocol):
    """Rounds that a feature adds, see `extras.ROUNDS`."""

    @property
    def outlook(self) -> str:
        """What the command would do, for `plan`."""

    @staticmethod
    def problems(settings: SweepSettings) -> list[str]:
        """Say which settings of a sweep do not go with it."""

    def check(self) -> None:
        """Refuse what cannot begin."""


def blocks_in_turn(
    rounds: Rounds,
    records: Sequence[RunRecord],
    first: Sequence[Block] = (),
    expect: Callable[["Counter[str]"], None] = lambda runs: None,
) -> Iterator[Block]:
    """Yield the blocks of all rounds; runs that were stopped from outside are repeated after their block.

    Screening runs are not: a cell without one gets its blocks all the same.

    Args:
        rounds: chooses them.
        records: of this command, oldest first; grows while the blocks run.
        first: blocks before those of the rounds.
        expect: is called before each block with how many runs of each cell are still to come.
    """
    blocks = first or rounds.next(records)
    while blocks:
        for index, block in enumerate(blocks):
            chosen = Counter(entry.cell_id for b in blocks[index:] for entry in b.entries)
            coming = rounds.num_runs(records) + (chosen if block.is_screening else Counter())
            expect(max(coming, chosen, key=Counter.total))
            num_before = len(records)
            yield block
            if block.is_screening:
                continue
            if again := repeated_runs(block, records[num_before:], rounds.state(records)):
                yield again
        blocks = rounds.next(records)


def grid(
    plan: SweepPlan,
    settings: SweepSettings,
    earlier: Sequence[RunRecord],
    code: Mapping[str, Any],
    pending: Iterable[tuple[str, str]] = (),
) -> Rounds:
    """Return rounds that give every cell of a plan the blocks that it lacks.

    Args:
        plan: the cells.
        settings: of the sweep.
        earlier: records that were in the store when the command began.
        code: state of the code that would measure now, see `planning.freeze.code_state`.
        pending: (cell id, block) of runs that jobs of a cluster will still do; they count as measured.
    """
    kind = _Grid if settings.minutes is None else BoundedGrid
    return kind(plan, settings, earlier, code, tuple(pending))


@dataclass(eq=False)
class _Grid:
    """A round is one block of every cell that lacks some, looking at what was measured before each.

    Runs that were stopped from outside (killed, preempted) are repeated at the end of their block, see
    `planning.blocks.repeated_runs`. Pairs that are lost nevertheless are made up for by further rounds.
    """

    _plan: SweepPlan
    _settings: SweepSettings
    earlier: Sequence[RunRecord]
    _code: Mapping[str, Any]
    _pending: Sequence[tuple[str, str]] = ()
    is_bounded = False

    def __post_init__(self) -> None:
        plan, settings, pending = self._plan, self._settings, self._pending
        self._size, self._order = settings.cells_per_block, BalancedOrder.after(self.earlier)
        self._known: tuple[int, ResumeState] | None = None
        begin = self.state(())
        self._rounds_left = max(begin.missing_blocks.values(), default=0) + EXTRA_ROUNDS
        is_measured = plan.runnable and not (begin.missing_blocks or begin.not_measured or pending)
        self._notice = "Everything that was asked for is measured already." if is_measured else ""
        # not of what is undecided
        self._screenings = list(screenings(plan, self._of_grid(()), settings))
        self._end = time.monotonic() + 60 * (settings.minutes or inf)
        self._members: Iterator[list[PlannedCell]] = iter(())

    @property
    def notice(self) -> str:
        """That nothing is missing; or how many screening runs and others come."""
        # after how many blocks something can be claimed, where the command looks at its intervals
        claim = describe_least_blocks(self._plan) if self.is_bounded else ""
        if not self._screenings:
            return self._notice or claim
        minutes, first = self._settings.minutes, count(len(self._screenings), "screening run")
        runs = runs_per_cell(self._plan, self.state(()).missing_blocks, self._size).total()
        then = (
            f"blocks for {minutes:g} min" if minutes else f"at most {count(runs, 'run')} in blocks"
        )
        return f"{first} first, one short run per cell, then {then}. {claim}".rstrip()

    def state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Compare the command with what is measured: its records only grow, and it asks thrice a block."""
        if self._known is None or self._known[0] != len(records):
            self._known = len(records), self._state(records)
        return self._known[1]

    def _state(self, records: Sequence[RunRecord]) -> ResumeState:
        return self._of_grid(records)

    def _of_grid(self, records: Sequence[RunRecord]) -> ResumeState:
        version = self._code["packages"]["torch"]
        return resume_state(
            self._plan, self.earlier, self._settings, version, records, self._pending
        )

    def _used(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """Return the runs of the present code that count, oldest first."""
        earlier = () if self._settings.remeasure else self.earlier
        version = self._code["packages"]["torch"]
        return usable_runs([*earlier, *records], self._plan, version, accepts_any_code=False).own

    def next(self, records: Sequence[RunRecord]) -> Sequence[Block]:
        """Return the next screening run, then the next block of the round, or the first of the next round."""
        if self._screenings and self._ends_in_time(self._screenings[0], records):
            return [self._screenings.pop(0)]
        return self._next_blocks(self.state(records), records)

    def _next_blocks(self, state: ResumeState, records: Sequence[RunRecord]) -> list[Block]:
        """Return the next block, where it ends in time."""
        awaited = {e.cell_id for block in self._screenings for e in block.entries}
        missing = {c: n for c, n in state.missing_blocks.items() if c not in awaited}
        while True:
            for members in self._members:
                if lacking := [e for e in members if e.cell_id in missing]:
                    block = block_of(self._plan, lacking, self._order, state)
                    return [block] if self._ends_in_time(block, records) else []
            if not self._rounds_left:
                return []
            self._rounds_left -= 1
            self._members = members_of_blocks(self._plan, dict.fromkeys(missing, 1), self._size)

    def _ends_in_time(self, block: Block, records: Sequence[RunRecord]) -> bool:
        """Return whether a block probably ends within `sweep.minutes`."""
        return True

    def num_runs(self, records: Sequence[RunRecord]) -> "Counter[str]":
        """Return the screening runs still to come, and the runs that the missing blocks take."""
        first = Counter(entry.cell_id for block in self._screenings for entry in block.entries)
        return first + runs_per_cell(self._plan, self.state(records).missing_blocks, self._size)

    def to_resume(self) -> tuple[Mapping[str, int], int]:
        """Return the blocks that are missing."""
        return self.state(()).missing_blocks, self._size

    def stopped(self, records: Sequence[RunRecord]) -> None:
        """Do nothing: the records say how far a grid came."""


class BoundedGrid(_Grid):
    """Screening runs, then a block of each undecided cell, round after round, until `sweep.minutes` are over.

    The minutes are of this command. A cell is decided where its interval says that it is faster or slower
    than its baseline, among all cells of the command, or equal to it within `sweep.indifference`. Since it
    is looked at after each block, the interval is `tables.stats.any_look_half_width`.
    """

    is_bounded = True

    def _state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Compare the command with what is measured; a cell that is undecided lacks a block.

        One that is compared with no other, as in a scaling curve, lacks the blocks of its `measurement`.
        """
        state = self._of_grid(records)
        ended = state.not_measured.keys() | state.pruned
        used = {e.baseline_id for e in self._plan.runnable if e.baseline_id != e.cell_id}
        own = {
            cell_id: lacking
            for cell_id, lacking in state.missing_blocks.items()
            if cell_id not in used and self._plan.entries[cell_id].baseline_id in (None, cell_id)
        }
        undecided = {c: n for c, n in self._undecided(records).items() if c not in ended}
        return replace(state, missing_blocks=own | undecided)

    def next(self, records: Sequence[RunRecord]) -> Sequence[Block]:
        """Return screening runs, or blocks of undecided cells that end in time; empty where there is none."""
        self._rounds_left = 1
        return super().next(records)

    def _ends_in_time(self, block: Block, records: Sequence[RunRecord]) -> bool:
        seconds = seconds_of_block(block, [*self.earlier, *records])
        screened = [run for run in records if run.is_screening]
        if not seconds and screened:  # of a cell that never ran
            seconds = screened[-1].environment.get("run_seconds") or 0.0
        return time.monotonic() + seconds <= self._end

    def _undecided(self, records: Sequence[RunRecord]) -> dict[str, int]:
        """Return the cells of which the runs do not say yet how they compare.

        Returns:
            Cell id -> the least number of blocks after which they may.
        """
        rows = DataFrame([run.row() | {"any_look": True} for run in self._used(records)])
        decided, pairs = set[str](), dict[str, int]()
        if len(rows):
            table = speedup_over(rows, self._plan.baselines, [set(self._plan.entries)])
            most = 1 + self._settings.indifference
            same = (table["claim_low"] >= 1 / most) & (table["claim_high"] <= most)
            sure = table["claim"].isin([*SHOWN, Claim.missing_blocks]) | same
            decided = set(table.loc[sure, "cell_id"])
            pairs = dict(zip(table["cell_id"], table["num_blocks"].tolist(), strict=True))
        compared = [e for e in self._plan.runnable if e.baseline_id not in (None, e.cell_id)]
        return {
            e.cell_id: max(1, MIN_BLOCKS - pairs.get(e.cell_id, 0))
            for e in compared
            if e.cell_id not in decided
        }
