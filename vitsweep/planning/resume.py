"""Trainings that were interrupted on this machine and saved: the same command continues them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vitsweep.files import read_lines
from vitsweep.planning.blocks import Block
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store


@dataclass(frozen=True, kw_only=True)
class InterruptedTraining:
    """A run without a record whose latest attempt saved its training.

    Attributes:
        cell_id: its cell.
        name: of the run.
        block: its block; what the run measured belongs to it.
        position: in the block.
        attempt: the next one.
        code_hash: of the code that began it, see `execution.code_hash`.
        step: steps that are done.
    """

    cell_id: str
    name: str
    block: str
    position: int
    attempt: int
    code_hash: str | None
    step: int


def interrupted_trainings(
    store: Store, code_hashes: Mapping[str, str], runs: Iterable[RunRecord]
) -> list[InterruptedTraining]:
    """Return the interrupted runs of some cells, oldest first.

    Jobs of a cluster continue their own runs. A run that was begun by other code is begun anew: half
    of it would be measured with each.

    Args:
        store: of the sweep.
        code_hashes: cell id -> hash of its code as it is now, for the cells to look at.
        runs: records of the store.
    """
    names = [run.run_id for run in runs]
    return [
        training
        for cell_id, code_hash in code_hashes.items()
        for training in _of_cell(store, cell_id)
        if training.code_hash == code_hash
        and not any(name.startswith(training.name) for name in names)
    ]


def _of_cell(store: Store, cell_id: str) -> list[InterruptedTraining]:
    events = [e for e in read_lines(store.cell(cell_id) / "attempts.jsonl") if e["job"] is None]
    found: dict[str, InterruptedTraining] = {}
    for end in events:
        if end.get("saved_step") is None:
            continue
        [start] = [e for e in events if e["event"] == "start" and e["run_id"] == end["run_id"]]
        name = start["name"]
        found[name] = InterruptedTraining(
            cell_id=cell_id,
            name=name,
            block=start["block"],
            position=start["position"],
            attempt=1 + max(e["attempt"] for e in events if e.get("name") == name),
            code_hash=start.get("code_hash"),
            step=end["saved_step"],
        )
    return list(found.values())


def blocks_to_complete(
    interrupted: Sequence[InterruptedTraining],
    plan: SweepPlan,
    missing: Mapping[str, int],
    runs: Iterable[RunRecord],
    cells_per_block: int,
) -> list[Block]:
    """Return the blocks of interrupted runs.

    What such a run measures belongs to its block, so the block gets the cells that the run is
    compared with as well, as far as they lack blocks and are not in it yet.

    Args:
        interrupted: the runs to continue; they come first in their blocks.
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        runs: records of the store.
        cells_per_block: cells of one block, baselines not counted.
    """
    present, left, found = {(run.block, run.cell_id) for run in runs}, dict(missing), []
    for training in interrupted:
        entry = plan.entries[training.cell_id]
        members = {entry.cell_id: entry}
        for other in _compared_with(entry, plan, left, cells_per_block):
            if (training.block, other.cell_id) not in present:
                members.setdefault(other.cell_id, other)
        left |= {cell_id: left.get(cell_id, 0) - 1 for cell_id in members}
        found.append(Block(training.block, tuple(members.values())))
    return found


def _compared_with(
    entry: PlannedCell, plan: SweepPlan, left: Mapping[str, int], size: int
) -> list[PlannedCell]:
    """Return the baseline of a cell, and the cells with the same one that lack blocks."""
    if entry.baseline_id is None:
        return []
    same = [e for e in plan.runnable if e.baseline_id == entry.baseline_id]
    lacking = [e for e in same if left.get(e.cell_id, 0) > 0]
    return [plan.entries[entry.baseline_id], *lacking[:size]]
