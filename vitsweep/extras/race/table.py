"""A race of `sweep.search=race` in words and as a table, from `race.json` of its sweep."""

import warnings
from collections.abc import Mapping
from math import exp
from pathlib import Path
from typing import Any

from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.files import UnsafeFileError
from vitsweep.foreign import foreign
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.tables.formatting import Column, count, number, ratio, ratios, text_columns, values
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables

Race = Mapping[str, Any]

RACE = "race.json"
COLUMNS = "cell_id name state runs first_block last_block to_leader reason".split()
STATES = ("leader", "runner-up", "in the race", "dropped", "out", "never ran")
"""In the order of the table."""
MOST_OPEN = 5
"""Cells that a sentence names."""


def read_race(folder: Path) -> dict[str, Any]:
    """Return what a race wrote into a sweep folder; {} where there was none.

    Raises:
        VitsweepError: the file is damaged: it has no table, or says nothing.
    """
    path = folder / RACE
    try:
        race: dict[str, Any] = dict(foreign(path))
        race_table(race), race_lines(race)
    except FileNotFoundError:
        return {}
    except UnsafeFileError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise VitsweepError(
            f"`{path}` is damaged. Restore it from a backup, or remove it: the same command writes it anew "
            "from the runs."
        ) from error
    return race


def race_in(tables: SweepTables) -> Race:
    """Return what a race wrote into the folder of the sweep; {} of several sweeps, and of a damaged one."""
    try:
        return read_race(tables.stores[0].root) if len(tables.stores) == 1 else {}
    except VitsweepError as error:  # the other tables are whole
        warnings.warn(str(error), DamagedRecordWarning, stacklevel=1)
        return {}


def race_table(race: Race) -> DataFrame:
    """Return `COLUMNS`, a row per cell: leader first, then those in the race, then by when they left.

    `to_leader` is the ratio to the leader's throughput (or throughput per cost) by the runs that chose it:
    these support no claim. `first_block` and `last_block` count from 1; the last is that after which a cell
    was dropped, or in which it ran last.
    """
    table = DataFrame([_row(cell, race) for cell in race.get("cells", ())], columns=COLUMNS)
    table = table.astype({"to_leader": float, "last_block": float})
    place = table["state"].map(STATES.index)
    ordered = table.assign(_place=place, _left=-table["last_block"], _slow=-table["to_leader"])
    ordered = ordered.sort_values(["_place", "_left", "_slow"], kind="stable", ignore_index=True)
    return ordered[COLUMNS].astype({"first_block": "Int64", "last_block": "Int64"})


def _row(cell: Mapping[str, Any], race: Race) -> dict[str, Any]:
    blocks, state = cell["blocks"], "in the race"
    if "reason" in cell:
        state = "out"
    elif "dropped_after" in cell:
        state = "dropped"
    elif cell["cell_id"] in (race.get("leader"), race.get("runner_up")):
        state = "leader" if cell["cell_id"] == race["leader"] else "runner-up"
    elif not blocks:
        state = "never ran"
    return {
        "cell_id": cell["cell_id"],
        "name": cell["name"],
        "state": state,
        "runs": len(blocks),
        "first_block": min(blocks) + 1 if blocks else None,
        "last_block": cell.get("dropped_after", max(blocks) + 1 if blocks else None),
        "to_leader": exp(cell["gain"]) if "gain" in cell else None,
        "reason": cell.get("reason", ""),
    }


def race_of(store: Store) -> DataFrame:
    """Return how a race went: when and why each cell was dropped; empty where there was no race."""
    found = read_race(store.root)
    return race_table(found) if found else DataFrame()


_SHOWN: dict[str, Column] = {
    "cell": values("name"),
    "state": values("state"),
    "runs": values("runs"),
    "last block": values("last_block"),
    "to the leader": ratios("to_leader"),
    "why": values("reason"),
}


def race_text(table: DataFrame) -> DataFrame:
    """Return the table of a race as text with printed headings."""
    return text_columns(table, _SHOWN)


def race_lines(race: Race) -> list[str]:
    """Return which cell won and by how much, how sure that is, and what it cost."""
    names = {str(cell["cell_id"]): str(cell["name"]) for cell in race.get("cells", ())}
    leader = race.get("leader")
    if leader is None:
        why = [f"{cell['name']}: {cell['reason']}" for cell in race["cells"] if "reason" in cell]
        return [say("nothing_measured", why=_listed(why) or "nothing ran")]
    base = race.get("baseline")
    name = f"{names[leader]}{', the baseline,' if leader == base else ''}"
    rank_by = race.get("rank_by", race.get("objective", "")).replace("_", " ")  # its name before
    confirmed = {
        c: found for c, found in race["confirmed"].items() if c in (base, race["runner_up"])
    }
    ratios = [
        f"{ratio(f['speedup'], f.get('speedup_low'), f.get('speedup_high'))} against {names[cell]}"
        for cell, f in sorted(confirmed.items(), key=lambda item: item[0] != base)
    ]
    blocks = max((f["num_blocks"] for f in confirmed.values()), default=0)
    lead = {"ratios": " and ".join(ratios) or "no claim", "blocks": count(blocks, "fresh block")}
    still_open = [names[cell] for cell in race["open"]]
    never = sum(not c["blocks"] and "reason" not in c for c in race["cells"])
    never_ran = f", {never} never ran" if never else ""
    end = {
        "state": "Not settled" if still_open else "Settled",
        "cells": count(len(still_open), "other cell") if still_open else "no dropped cell",
        "names": f"{never_ran}: {_listed(still_open)}" if still_open else "",
        "runs": count(race["num_runs"], "run"),
        "minutes": number(race["seconds"] / 60),
        "share": 100 * race["num_runs"] / race["grid_runs"],
        "blocks": count(race["grid_blocks"], "block"),
        "more": " The same command goes on." * (bool(still_open) and race.get("ended") == "budget"),
    }
    is_shown = any((found.get("speedup_low") or 0) > 1 for found in confirmed.values())
    leads = "may lead" if still_open else "leads" if is_shown else say("race_unsure")
    if any(found["speedup"] <= 1 for found in confirmed.values()):
        leads = "is not ahead"
    return [
        say("race_leads", name=name, leads=leads, rank_by=rank_by, **lead),
        say("race_end", name=names[leader], margin=100 * race["indifference"], **end),
    ]


def _listed(names: list[str]) -> str:
    more = f"; and {len(names) - MOST_OPEN} more" if len(names) > MOST_OPEN else ""
    return "; ".join(names[:MOST_OPEN]) + more
