"""Trainings that were interrupted on this machine and saved: the same command goes on with them."""

from collections.abc import Iterable
from dataclasses import dataclass

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
