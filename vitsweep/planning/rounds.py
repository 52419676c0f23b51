"""Rounds: which blocks a command runs next, from what is measured by then."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.planning.blocks import (
    BalancedOrder,
    Block,
    block_of,
    look_blocks,
    members_of_blocks,
    repeated_runs,
    runs_per_cell,
)
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord

EXTRA_ROUNDS = 3
"""So many rounds more than planned make up for pairs that were lost to runs that were stopped."""


class Rounds(Protocol):
    """Chooses the blocks of a command; `records` are those that the command has added, oldest first."""

    earlier: Sequence[RunRecord]
    """Records that were in the store when the command began."""

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
            Cell id -> number of blocks, and the cells of such a block beside its baseline.
        """

    def stopped(self, records: Sequence[RunRecord]) -> None:
        """Note how far the command came; called where the user has stopped it."""


def blocks_in_turn(
    rounds: Rounds,
    records: Sequence[RunRecord],
    first: Sequence[Block] = (),
    expect: Callable[["Counter[str]"], None] = lambda runs: None,
) -> Iterator[Block]:
    """Yield the blocks of all rounds; runs that were stopped from outside are repeated after their block.

    Looks are not: a cell without one gets its blocks all the same.

    Args:
        rounds: chooses them.
        records: of this command, oldest first; grows while the blocks run.
        first: blocks before those of the rounds.
        expect: is told before each block how many runs of each cell are still to come.
    """
    blocks = first or rounds.next(records)
    while blocks:
        for number, block in enumerate(blocks):
            chosen = Counter(entry.cell_id for b in blocks[number:] for entry in b.entries)
            coming = rounds.num_runs(records) + (chosen if block.is_look else Counter())
            expect(max(coming, chosen, key=Counter.total))
            num_before = len(records)
            yield block
            if block.is_look:
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
    return _Grid(plan, settings, earlier, code, tuple(pending))


class _Grid:
    """A round is one block of every cell that lacks some, looking at what was measured before each.

    Runs that were stopped from outside (killed, preempted) are repeated at the end of their block, see
    `planning.blocks.repeated_runs`. Pairs that are lost nevertheless are made up for by further rounds.
    """

    def __init__(
        self,
        plan: SweepPlan,
        settings: SweepSettings,
        earlier: Sequence[RunRecord],
        code: Mapping[str, Any],
        pending: Sequence[tuple[str, str]],
    ) -> None:
        self.earlier, self._pending = earlier, pending
        self._plan, self._settings, self._code = plan, settings, code
        self._size, self._order = settings.cells_per_block, BalancedOrder.after(earlier)
        begin = self.state(())
        self._rounds_left = max(begin.missing_blocks.values(), default=0) + EXTRA_ROUNDS
        is_measured = plan.runnable and not (begin.missing_blocks or begin.not_measured or pending)
        self._notice = "Everything that was asked for is measured already." if is_measured else ""
        self._looks = list(look_blocks(plan, begin, settings))
        self._members: Iterator[list[PlannedCell]] = iter(())

    @property
    def notice(self) -> str:
        """That nothing is missing, or ""."""
        return self._notice

    def state(self, records: Sequence[RunRecord]) -> ResumeState:
        """Compare the command with what is measured."""
        return resume_state(
            self._plan, self.earlier, self._settings, self._code, records, self._pending
        )

    def next(self, records: Sequence[RunRecord]) -> Sequence[Block]:
        """Return all looks, then the next block of the round, or the first of the next round."""
        if self._looks:
            looks, self._looks = self._looks, []
            return looks
        state = self.state(records)
        while True:
            for members in self._members:
                if lacking := [e for e in members if e.cell_id in state.missing_blocks]:
                    return [block_of(self._plan, lacking, self._order, state.not_measured)]
            if not self._rounds_left:
                return []
            self._rounds_left -= 1
            once = dict.fromkeys(state.missing_blocks, 1)
            self._members = members_of_blocks(self._plan, once, self._size)

    def num_runs(self, records: Sequence[RunRecord]) -> "Counter[str]":
        """Return the runs that the missing blocks take."""
        return runs_per_cell(self._plan, self.state(records).missing_blocks, self._size)

    def to_resume(self) -> tuple[Mapping[str, int], int]:
        """Return the blocks that are missing."""
        return self.state(()).missing_blocks, self._size

    def stopped(self, records: Sequence[RunRecord]) -> None:
        """Do nothing: the records say how far a grid came."""
