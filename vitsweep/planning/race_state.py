"""What `race.json` says of the cells and rounds of a race."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitsweep.planning.race_cells import RaceCells
from vitsweep.racing.model import Runs
from vitsweep.racing.rules import LEVEL, Verdict


def state_of_race(
    cells: RaceCells,
    labels: Mapping[str, str],
    runs: Runs,
    verdicts: Sequence[Verdict],
    left: Mapping[str, tuple[int, str]],
) -> dict[str, Any]:
    """Return leader, diagnostics, rounds and a row per cell as plain containers.

    Args:
        cells: of the race.
        labels: cell id -> its name.
        runs: that chose the leader.
        verdicts: after each round, oldest first.
        left: cell id -> block after which it left without being shown slower, and why.
    """
    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(cells.entries):
        blocks = runs.block[runs.cell == number].tolist()
        row = {"cell_id": entry.cell_id, "name": labels[entry.cell_id], "blocks": blocks}
        if entry.cell_id in left:
            row["left_after"], row["reason"] = left[entry.cell_id]
        elif after := [v.num_blocks for v in verdicts if not v.alive[number]]:
            row["dropped_after"] = after[0]
        if verdicts:
            row["gain"] = float(verdicts[-1].gain[number])
            row["gain_sd"] = float(verdicts[-1].gain_sd[number])
        rows.append(row)
    document = {"level": LEVEL, "num_blocks": runs.num_blocks, "cells": rows}
    if not verdicts:
        return document
    last = verdicts[-1]
    return document | {
        "leader": cells.entries[last.leader].cell_id,
        "runner_up": cells.entries[last.runner_up].cell_id,
        "baseline": cells.entries[last.leader].baseline_id,
        "scales": vars(last.scales),
        "odd_runs": float(last.odd_runs.mean()),
        "rounds": [
            {
                "blocks": v.num_blocks,
                "runs": int(v.num_runs.sum()),
                "leader": cells.entries[v.leader].cell_id,
                "alive": int(v.alive.sum()),
                "chance_of_better": v.chance_of_better,
            }
            for v in verdicts
        ],
    }
