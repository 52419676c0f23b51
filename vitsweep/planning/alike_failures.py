"""A sweep that cannot work stops: its baseline and other cells fail alike, and nothing is measured."""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vitsweep.planning.blocks import Block
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord, Status
from vitsweep.spec.cell_spec import flatten
from vitsweep.tables.formatting import count

ENOUGH = 3
"""So many cells that fail alike, the baseline of each among them, make the sweep doubtful."""


@dataclass
class AlikeFailures:
    """Ends the blocks of a command whose cells fail alike, before all of them have.

    One more cell is tried first, the one that shares fewest choices with those that failed. If it ends in
    any other way, the command goes on and is not doubted again.

    Attributes:
        plan: the cells of the command.
        records: that the command has added, oldest first; grows while the blocks run.
        not_repeated: cell id -> its run, of cells that ended earlier and are not run again.
        doubts: False where an earlier command has measured a cell.
        said: why the command stopped, or "".
    """

    plan: SweepPlan
    records: Sequence[RunRecord]
    not_repeated: Mapping[str, RunRecord]
    doubts: bool
    said: str = ""
    _tried: str = field(default="", init=False)  # the one more cell

    def ending(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """Yield blocks until the sweep proves to be one that cannot work."""
        for block in blocks:
            if one_more := self._one_more():
                self._tried = one_more.cell_id
                yield Block(secrets.token_hex(5), (one_more,), purpose=block.purpose)
            failed = self._failed_alike()
            if self._tried in failed and (left := self._not_started()):
                line = last_line(failed[self._tried])
                self.said = (
                    f"{count(len(failed), 'cell')} failed alike: {line} Nothing was measured; the others "
                    f"({len(left)}) were not started. After the mend the same command with "
                    "`sweep.retry=[failed]` runs all of them."
                )
                return
            self.doubts = self.doubts and not self._tried
            yield block

    def passes_over(self, entry: PlannedCell) -> bool:
        """Return whether a cell waits, within a block, until one more cell was tried."""
        return self._one_more() is not None

    def _one_more(self) -> PlannedCell | None:
        failed = self._failed_alike()
        if self._tried or len(failed) < ENOUGH:
            return None
        choices = [flatten(self.plan.entries[cell_id].spec).items() for cell_id in failed]

        def num_shared(entry: PlannedCell) -> int:
            own = flatten(entry.spec)
            return sum(own.get(key) == value for of_one in choices for key, value in of_one)

        return min(self._not_started(), key=num_shared, default=None)

    def _not_started(self) -> list[PlannedCell]:
        seen = {run.cell_id for run in self.records} | set(self.not_repeated)
        return [entry for entry in self.plan.runnable if entry.cell_id not in seen]

    def _failed_alike(self) -> dict[str, RunRecord]:
        """Return cells that failed with one last line, each with its baseline; {} of a sweep that works."""
        if not self.doubts or any(run.status == Status.measured for run in self.records):
            return {}
        by_line: dict[str, dict[str, RunRecord]] = {}
        for run in [*self.not_repeated.values(), *self.records]:
            if run.status == Status.failed:
                alike = re.sub(r"\d+", "", last_line(run))
                by_line.setdefault(alike, {})[run.cell_id] = run
        most = max(by_line.values(), key=len, default={})
        entries = self.plan.entries
        return {c: run for c, run in most.items() if entries[c].baseline_id in (None, *most)}


def last_line(run: RunRecord) -> str:
    """Return the last line of the reason of a run; it ends as a sentence does."""
    line = run.reason.strip().rpartition("\n")[2]
    return line if line.endswith((".", "!", "?")) else f"{line}."
