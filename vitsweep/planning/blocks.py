"""Which cell runs when: blocks of cells and their baselines, in random order."""

import random
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan


@dataclass(frozen=True)
class Block:
    """Cells to be run back to back.

    Attributes:
        name: unique over all sweeps and machines, so that records can be merged.
        entries: in the order in which they run.
    """

    name: str
    entries: tuple[PlannedCell, ...]


def blocks(plan: SweepPlan, missing: Mapping[str, int], cells_per_block: int) -> Iterator[Block]:
    """Yield the blocks that give every cell the runs it lacks.

    A block holds some cells and the baseline of each, so that every ratio is taken between runs
    that lie minutes apart. Large sweeps are cut into several blocks per round, each with its own
    baseline runs. All cells get their first run before any gets its second.

    Args:
        plan: the cells.
        missing: cell -> number of runs it still lacks.
        cells_per_block: cells of one block, baselines not counted.
    """
    order = random.Random(secrets.randbits(64))
    for round_ in range(max(missing.values(), default=0)):
        lacking = [e for e in plan.runnable if missing.get(e.cell_id, 0) > round_]
        for members in comparisons(lacking, cells_per_block):
            needed = {e.cell_id: e for e in members}
            needed |= {b: plan.entries[b] for e in members if (b := e.baseline_id)}
            shuffled = list(needed.values())
            order.shuffle(shuffled)
            yield Block(secrets.token_hex(5), tuple(shuffled))


def comparisons(entries: list[PlannedCell], size: int) -> Iterator[list[PlannedCell]]:
    """Keep cells with the same baseline together; a baseline alone joins its own cells."""
    groups: dict[str | None, list[PlannedCell]] = {}
    for entry in entries:
        groups.setdefault(entry.baseline_id, []).append(entry)
    for group in groups.values():
        variants = [e for e in group if e.baseline_id != e.cell_id]
        baselines = [e for e in group if e.baseline_id == e.cell_id]
        for start in range(0, len(variants), size):
            yield variants[start : start + size]
        if baselines and not variants:
            yield baselines
