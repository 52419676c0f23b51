"""`race.json` of a sweep folder: how far a race came, for tables and charts."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from vitsweep.files import write_atomically
from vitsweep.racing.cells import RaceCells
from vitsweep.racing.conclusions import LEVEL, Verdict
from vitsweep.racing.model import Runs
from vitsweep.results.store import RACE
from vitsweep.tables.stats import DRIFT_LEVEL, drift


def write_race(folder: Path, document: Mapping[str, Any]) -> None:
    """Replace what a race wrote into a sweep folder."""
    write_atomically(folder / RACE, json.dumps(document, separators=(",", ":")))


def state_of_race(
    cells: RaceCells,
    labels: Mapping[str, str],
    runs: Runs,
    verdicts: Sequence[Verdict],
    left: Mapping[str, tuple[int, str]],
) -> dict[str, Any]:
    """Return leader, front, diagnostics, rounds and a row per cell as plain containers.

    `gain` and `memory_gain` of a cell are log ratios of its throughput and peak memory to the leader's.

    Args:
        cells: of the race.
        labels: cell id -> its name.
        runs: that chose the leader.
        verdicts: after each round, oldest first.
        left: cell id -> block after which it left without being shown slower, and why.
    """
    rows: list[dict[str, Any]] = []
    drifts = _drifts(cells, runs)
    for number, entry in enumerate(cells.entries):
        blocks = runs.block[runs.cell == number].tolist()
        name = labels[entry.cell_id]
        if cells.settings.replicate:  # the cell stands for all its seeds
            name = re.sub(rf" ?\b{cells.settings.replicate}=\S+", "", name).strip() or "plain"
        row = {"cell_id": entry.cell_id, "name": name, "blocks": blocks}
        if number in drifts:
            row["drift"] = drifts[number]
        if entry.cell_id in left:
            row["left_after"], row["reason"] = left[entry.cell_id]
        elif (after := _dropped_after(verdicts, number)) is not None:
            row["dropped_after"] = after
        if verdicts:
            row["gain"] = float(verdicts[-1].gain[number])
            row["gain_sd"] = float(verdicts[-1].gain_sd[number])
            if (saving := verdicts[-1].memory_saving) is not None:
                row["memory_gain"] = float(-saving[number])
        rows.append(row)
    document = {"level": LEVEL, "num_blocks": runs.num_blocks, "cells": rows}
    if not verdicts:
        return document
    last = verdicts[-1]
    return document | {
        "leader": cells.entries[last.leader].cell_id,
        "runner_up": cells.entries[last.runner_up].cell_id,
        "baseline": cells.first_of(cells.entries[last.leader].baseline_id or "") or None,
        "front": [cells.entries[member].cell_id for member in last.front],
        "scales": vars(last.scales),
        "odd_runs": float(last.odd_runs.mean()),
        "rounds": [
            {
                "blocks": v.num_blocks,
                "runs": int(v.num_runs.sum()),
                "leader": cells.entries[v.leader].cell_id,
                "alive": int(v.alive.sum()),
                "chance_of_better": v.chance_of_better,
                "front": [cells.entries[member].cell_id for member in v.front],
            }
            for v in verdicts
        ],
    }


def _drifts(cells: RaceCells, runs: Runs) -> dict[int, float]:
    """Return the cells whose ratio to their baseline changed over the blocks, and by how much, log."""
    found: dict[int, tuple[float, float]] = {}
    for number, baseline in enumerate(cells.baselines):
        shared, own, of_baseline = np.intersect1d(
            runs.block[runs.cell == number], runs.block[runs.cell == baseline], return_indices=True
        )
        if number != baseline:
            ratio = (
                runs.log[runs.cell == number][own] - runs.log[runs.cell == baseline][of_baseline]
            )
            found[number] = drift(shared.astype(float), ratio)
    tested = {number: some for number, some in found.items() if some[0] == some[0]}
    return {n: change for n, (change, p) in tested.items() if p * len(tested) < DRIFT_LEVEL}


def _dropped_after(verdicts: Sequence[Verdict], number: int) -> int | None:
    """Return the blocks after which a cell was dropped for good; None where it still stands."""
    gone = list(takewhile(lambda verdict: not verdict.alive[number], reversed(verdicts)))
    return gone[-1].num_blocks if gone else None
