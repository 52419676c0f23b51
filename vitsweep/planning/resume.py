"""Trainings that were interrupted on this machine and saved: the same command goes on with them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vitsweep.planning.blocks import Block
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store, read_lines


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A run whose latest attempt saved its training.

    Attributes:
        cell_id: its cell.
        name: of the run.
        block: its block; what the run measured belongs to it.
        position: in the block.
        attempt: the next one.
        git_commit: of the code that began it.
        step: steps that are done.
    """

    cell_id: str
    name: str
    block: str
    position: int
    attempt: int
    git_commit: str | None
    step: int


def unfinished(
    store: Store, cells: Iterable[str], runs: Iterable[RunRecord], git_commit: str | None
) -> list[Unfinished]:
    """Return the interrupted runs of some cells, oldest first.

    Jobs of a cluster go on with their own. A run that was begun by another state of the code
    (`git_commit`) is begun anew: its parts would not belong together.
    """
    names = [run.run_id for run in runs]
    return [
        one
        for cell_id in cells
        for one in _of_cell(store, cell_id)
        if one.git_commit == git_commit and not any(n.startswith(one.name) for n in names)
    ]


def _of_cell(store: Store, cell_id: str) -> list[Unfinished]:
    life = [e for e in read_lines(store.cell(cell_id) / "attempts.jsonl") if e["job"] is None]
    found: dict[str, Unfinished] = {}
    for end in life:
        if end.get("saved_step") is None:
            continue
        [start] = [e for e in life if e["event"] == "start" and e["run_id"] == end["run_id"]]
        name = start["name"]
        found[name] = Unfinished(
            cell_id=cell_id,
            name=name,
            block=start["block"],
            position=start["position"],
            attempt=1 + max(e["attempt"] for e in life if e.get("name") == name),
            git_commit=start["git_commit"],
            step=end["saved_step"],
        )
    return list(found.values())


def completing_blocks(
    interrupted: Sequence[Unfinished],
    plan: SweepPlan,
    missing: Mapping[str, int],
    runs: Iterable[RunRecord],
    cells_per_block: int,
) -> tuple[list[Block], dict[str, int]]:
    """Return the blocks of interrupted runs, and what is missing beside them.

    What such a run measured belongs to its block: the cells that it is compared with complete that,
    as far as they lack runs and have none in it.
    """
    present, left, found = {(run.block, run.cell_id) for run in runs}, dict(missing), []
    for one in interrupted:
        entry = plan.entries[one.cell_id]
        members = {entry.cell_id: entry}
        for mate in _compared_with(entry, plan, left, cells_per_block):
            if (one.block, mate.cell_id) not in present:
                members.setdefault(mate.cell_id, mate)
        left |= {cell_id: left.get(cell_id, 0) - 1 for cell_id in members}
        found.append(Block(one.block, tuple(members.values())))
    return found, left


def _compared_with(
    entry: PlannedCell, plan: SweepPlan, left: Mapping[str, int], size: int
) -> list[PlannedCell]:
    """Return the baseline of a cell, and the cells with the same one that lack runs."""
    if entry.baseline_id is None:
        return []
    same = [e for e in plan.runnable if e.baseline_id == entry.baseline_id]
    lacking = [e for e in same if left.get(e.cell_id, 0) > 0]
    return [plan.entries[entry.baseline_id], *lacking[:size]]
