"""A race of `sweep.search=race` in words and as a table, from `race.json` of its sweep."""

from collections.abc import Mapping
from math import exp
from typing import Any

from pandas import DataFrame, Series

from vitsweep.tables.formatting import (
    Column,
    count,
    number,
    ratio,
    text_columns,
    times,
    values,
    with_interval,
)
from vitsweep.tables.stats import DRIFT_LEVEL, MIN_BLOCKS

Race = Mapping[str, Any]

COLUMNS = (
    "cell_id name state runs first_block last_block to_leader to_leader_low to_leader_high "
    "memory_to_leader reason"
).split()
STATES = ("leader", "front", "runner-up", "in the race", "dropped", "out", "never ran")
"""In the order of the table."""
NORMAL_95 = 1.96
RUGGED = 0.015
"""A residual of cells above it is more than interactions of three techniques usually make."""
MOST_OPEN = 5
"""Cells still in the race that a sentence names."""
LEAST_CHANCE = 0.01
"""Smaller probabilities are not told apart: they are counted in 300 draws."""
TIME_TO_ACCURACY = "time to accuracy"


def race_table(race: Race) -> DataFrame:
    """Return `COLUMNS`, a row per cell: leader first, then those in the race, then by when they left.

    `to_leader` is the ratio to the leader's throughput (or another objective) by the race's model, with
    the model's 95 % interval: the estimates on which the race decided, and as such not corrected for
    the choice of the leader. `memory_to_leader` is the ratio of peak memory in a race for a Pareto
    front, whose leader is its fastest cell, and else empty. `first_block` and `last_block` count from
    1; the last is that after which a cell left, or the race's last.
    """
    rows = [_row(cell, race) for cell in race.get("cells", ())]
    table = DataFrame(rows, columns=COLUMNS).astype({"first_block": "Int64"})
    place = table["state"].map(STATES.index)
    key = place.where(place != STATES.index("out"), STATES.index("dropped"))
    ordered = table.assign(_place=key, _left=-table["last_block"], _slow=-table["to_leader"])
    ordered = ordered.sort_values(["_place", "_left", "_slow"], kind="stable", ignore_index=True)
    return ordered[COLUMNS]


def _row(cell: Mapping[str, Any], race: Race) -> dict[str, Any]:
    blocks, last = cell["blocks"], int(race["num_blocks"])
    row = {
        "cell_id": cell["cell_id"],
        "name": cell["name"],
        "runs": len(blocks),
        "first_block": min(blocks) + 1 if blocks else None,
        "reason": "",
    }
    if "left_after" in cell:
        row |= {"state": "out", "last_block": cell["left_after"] + 1, "reason": cell["reason"]}
    elif cell["cell_id"] in race.get("front", ()) and cell["cell_id"] != race["leader"]:
        row |= {"state": "front", "last_block": last}
    elif cell["cell_id"] in (race.get("leader"), race.get("runner_up")):
        is_leader = cell["cell_id"] == race["leader"]
        row |= {"state": "leader" if is_leader else "runner-up", "last_block": last}
    elif "dropped_after" in cell:
        after = cell["dropped_after"]
        than = (
            "a cell of the front that needs no more memory" if race.get("front") else "the leader"
        )
        if blocks:
            reason = f"shown slower than {than} after block {after}"
        else:
            reason = f"predicted slower than {than} from other cells after block {after}"
        row |= {
            "state": "dropped" if blocks else "never ran",
            "last_block": after,
            "reason": reason,
        }
    else:
        row |= {"state": "in the race" if blocks else "never ran", "last_block": last}
    if "gain" in cell and has_begun(race) and (blocks or row["state"] != "out"):
        gain, half = cell["gain"], NORMAL_95 * cell["gain_sd"]
        row |= {
            "to_leader": exp(gain),
            "to_leader_low": exp(gain - half),
            "to_leader_high": exp(gain + half),
        }
    if "memory_gain" in cell:
        row["memory_to_leader"] = exp(cell["memory_gain"])
    return row


def has_begun(race: Race) -> bool:
    """Return whether the start is over: before, runs are too few to say how cells compare."""
    return int(race["num_blocks"]) >= int(race["num_start_blocks"])


def race_history(race: Race) -> DataFrame:
    """Return the table with `blocks` (in which a cell ran) and `led` (first and last block, from 1)."""
    table = race_table(race)
    blocks = {cell["cell_id"]: cell["blocks"] for cell in race.get("cells", ())}
    led: dict[str, list[tuple[int, int]]] = {cell: [] for cell in blocks}
    begin = 0
    for round_ in race.get("rounds", ()):
        for cell in round_.get("front") or [round_["leader"]]:
            led[cell].append((begin + 1, round_["blocks"]))
        begin = round_["blocks"]
    return table.assign(
        blocks=[blocks[cell] for cell in table["cell_id"]],
        led=Series([led[cell] for cell in table["cell_id"]], table.index, dtype=object),
    )


def _blocks(table: DataFrame) -> list[str]:
    rows = zip(table["runs"], table["first_block"], table["last_block"], strict=True)
    return [f"{first} to {last}" if runs else "" for runs, first, last in rows]


_SHOWN: dict[str, Column] = {
    "cell": values("name"),
    "state": values("state"),
    "runs": values("runs"),
    "blocks": _blocks,
    "to the leader": lambda t: with_interval("to_leader")(
        t.assign(to_leader=t["to_leader"].where(t["state"] != "leader"))
    ),
    "memory": values("memory_to_leader", times),
    "why": values("reason"),
}


def race_text(table: DataFrame) -> DataFrame:
    """Return the table of a race as text with printed headings."""
    return text_columns(table, _SHOWN)


def race_answer(race: Race) -> str:
    """Return which cell won, by how much, and how sure that is, in one sentence or two."""
    leader = _names(race).get(str(race.get("leader")))
    if leader is None:
        return _no_leader(race)
    if race.get("front"):
        return _front_answer(race)
    confirmed, baseline = race.get("confirmed", {}), race.get("baseline")
    says = "leads in " + objective_words(race)
    against = "against"
    if objective_words(race) == TIME_TO_ACCURACY:
        says, against = "reaches the accuracy first", "as fast as"
    says += "" if has_begun(race) else " so far"
    leads = f"{leader}{', the baseline,' if baseline == race['leader'] else ''} {says}"
    parts = []
    others = [(baseline, "the baseline"), (race.get("runner_up"), "the runner-up")]
    if baseline == race.get("runner_up"):
        others = [(baseline, "the baseline, which is the runner-up,")]
    for cell, what in others:
        if cell in confirmed and cell != race["leader"]:
            found = confirmed[cell]
            size = ratio(found["speedup"], found["speedup_low"], found["speedup_high"])
            parts.append(f"{size} {against} {what} {_apart(_names(race)[str(cell)], leader)}")
    if parts:
        fresh = max(found["num_blocks"] for found in confirmed.values())
        sized = " and ".join(parts)
        return (
            f"{leads}: {sized}, over {count(fresh, 'fresh block')} that had no part in the choice"
            f"{', too few for an interval' if fresh < MIN_BLOCKS else ''}."
        )
    by_model = _by_model(race, baseline, against) if has_begun(race) else ""
    return f"{leads}{by_model}; it was not measured again in fresh blocks."


def _no_leader(race: Race) -> str:
    """Return why a race has no result."""
    cells = race.get("cells", ())
    out = [cell for cell in cells if "left_after" in cell]
    if not out or len(out) < len(cells):
        return "The race has no result yet: no two cells were measured."
    told = "; ".join(f"{cell['name']}: {cell['reason']}" for cell in out[:MOST_OPEN])
    more = f"; and {len(out) - MOST_OPEN} more" if len(out) > MOST_OPEN else ""
    return f"The race has no result: every cell is out ({told}{more})."


def _apart(name: str, other: str) -> str:
    """Return the settings of a cell's name that another name lacks; the whole name where there is none."""
    return " ".join(word for word in name.split() if word not in other.split()) or name


def _front_answer(race: Race) -> str:
    """Return the cells of the front, fastest first, each with its throughput and its memory."""
    names, confirmed = _names(race), race.get("confirmed", {})
    baseline = race.get("baseline")
    of = "the baseline" if baseline in names else "the fastest"
    parts = []
    for cell in race["front"]:
        if found := confirmed.get(cell):
            size = ratio(found["speedup"], found["speedup_low"], found["speedup_high"])
            parts.append(f"{names[cell]} ({size}, {times(found['memory'])} the memory)")
        else:
            parts.append(names[cell] + (f" ({of} itself)" if cell == baseline else ""))
    what = f"The Pareto front of {objective_words(race)} against peak memory"
    listed = f"{what} has {count(len(parts), 'cell')}: {'; '.join(parts)}"
    if not confirmed:
        return f"{listed}. It was not measured again in fresh blocks."
    fresh = max(found["num_blocks"] for found in confirmed.values())
    return f"{listed}; ratios to {of} over {count(fresh, 'fresh block')} that had no part in the choice."


def objective_words(race: Race) -> str:
    """Return what a race looked for the best of, peak memory left out."""
    objective = race.get("objective", "throughput")
    names = [objective] if isinstance(objective, str) else objective
    return next(name for name in names if name != "peak_memory").replace("_", " ")


def _by_model(race: Race, baseline: Any, against: str) -> str:
    [*found] = [c for c in race["cells"] if c["cell_id"] == baseline and "gain" in c]
    if not found or baseline == race["leader"]:
        return ""
    return (
        f": {times(exp(-found[0]['gain']))} {against} the baseline "
        f"{_apart(found[0]['name'], _names(race)[race['leader']])} by the race's model, "
        "uncorrected and without an interval"
    )


def race_lines(race: Race) -> list[str]:
    """Return how the race ended, what it cost, and what to think of its figures."""
    return [line for line in (_end(race), _cost(race), *_diagnostics(race)) if line]


def _end(race: Race) -> str:
    if not race.get("rounds"):
        if race["ended"] == "alone":
            is_left = any("left_after" not in cell for cell in race["cells"])
            left = "Only one cell is left" if is_left else "No cell is left"
            return f"{left} that can be measured: there is nothing to race."
        if not race["ended"]:
            return "Stopped before the first round; the same command continues."
        return "The race ended before its first round; the same command continues it."
    spent = "the budget is spent" if race["budget"] else "it cost as much as the full grid"
    if not has_begun(race):
        why = (
            f"{spent} within the start" if race["ended"] == "budget" else "stopped within the start"
        )
        return (
            f"Not settled, {why}: {race['num_blocks']} of its {count(race['num_start_blocks'], 'block')} "
            f"are measured, too few to drop a cell. {_to_continue(race)}"
        )
    chance, margin = race["rounds"][-1]["chance_of_better"], f"{100 * race['indifference']:g} %"
    what = f"a cell still in the race is faster than the leader by more than {margin}"
    if race.get("front"):
        what = (
            f"a cell still in the race is better than one of the front by more than {margin} in both, or is "
            f"not within {margin} of any"
        )
    likely = (
        f"{100 * chance:.0f} %" if chance >= LEAST_CHANCE else f"under {100 * LEAST_CHANCE:g} %"
    )
    if race["ended"] == "settled":
        never, word = _never_ran(race), "Settled"
        if never:
            word = f"Settled if effects add up; {count(never, 'cell')} never ran"
        if race["rounds"][-1]["alive"] < 2 and not race.get("front"):
            shown = "shown, or predicted from others," if never else "shown"
            return f"{word}: all other cells were {shown} slower than the leader."
        rule = f"at most {_level(race)} in two consecutive rounds"
        return f"{word}: the probability that {what} is {likely}, {rule}."
    if race["ended"] == "alone":
        return "Settled: every other cell failed or was left out."
    why = spent if race["ended"] == "budget" else "the race goes on"
    rule = ""
    if chance <= race["level"]:
        rule = f", and has to be at most {_level(race)} in two consecutive rounds"
    table = race_table(race)
    others = table[table["state"].isin(["runner-up", "in the race", "never ran"])]["name"]
    more = f" and {len(others) - MOST_OPEN} more" if len(others) > MOST_OPEN else ""
    still_open = f" Still open: {'; '.join(others.head(MOST_OPEN))}{more}." if len(others) else ""
    return (
        f"Not settled, {why}: the probability that {what} is {likely}{rule}.{still_open} "
        f"{_to_continue(race)}"
    )


def _to_continue(race: Race) -> str:
    is_of_race = str(race["budget"] or "").startswith("sweep.max_gpu_hours")
    larger = "; `sweep.max_gpu_hours` has to be larger then" if is_of_race else ""
    return f"The same command continues{larger}."


def _never_ran(race: Race) -> int:
    """Return how many cells are judged without a run of their own."""
    return sum(not cell["blocks"] and "left_after" not in cell for cell in race["cells"])


def _level(race: Race) -> str:
    return f"{100 * race['level']:g} %"


def _cost(race: Race) -> str:
    runs, grid = race["num_runs"], race["grid_runs"]
    if not runs:
        return ""
    minutes = race["seconds"] / 60
    share = f"{100 * runs / grid:.0f} %" if grid else "unknown"
    over = race["seconds"] - (race.get("budget_seconds") or race["seconds"])
    beyond = f" That is {number(over / 60)} min more than `{race['budget']}`."
    return (
        f"It took {count(runs, 'run')} in {number(minutes)} min, confirmation included; the full grid, at "
        f"{count(race['grid_blocks'], 'block')}, takes {count(grid, 'run')}, about "
        f"{number(minutes * grid / runs)} min: the race took {share} of its runs.{beyond if over > 0 else ''}"
    )


def _diagnostics(race: Race) -> list[str]:
    if not race.get("scales") or not has_begun(race):
        return []
    lines = [] if objective_words(race) != TIME_TO_ACCURACY else [_seeds(race)]
    lines += [_drift(cell) for cell in race["cells"] if "drift" in cell]
    scales = {name: f"{100 * value:.1f} %" for name, value in race["scales"].items()}
    lines += [
        f"The {_level(race)} holds under the race's model; it is no worst case. Standard deviations by the "
        f"model: techniques {scales['main']}, pairs {scales['pairs']}, cells beyond these "
        f"{scales['residual']}, run to run {scales['noise']}. {100 * race['odd_runs']:.0f} % of runs are "
        "outliers and count less."
    ]
    if race["scales"]["residual"] > RUGGED:
        lines.append(
            "The landscape is rugged: techniques and their pairs do not explain how cells differ."
        )
    return lines


def _drift(cell: Mapping[str, Any]) -> str:
    change = 100 * (exp(cell["drift"]) - 1)
    return (
        f"{cell['name']} drifted: its ratio to the baseline changed by {change:+.0f} % over the blocks "
        f"(p < {DRIFT_LEVEL:g} over all cells); the race takes each ratio for constant."
    )


def _seeds(race: Race) -> str:
    """Return for which seeds the times to an accuracy hold."""
    seeds = race["seeds"]
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"Times to the accuracy are those of {noun} {', '.join(map(str, seeds))}."


def _names(race: Race) -> dict[str, str]:
    return {str(cell["cell_id"]): str(cell["name"]) for cell in race.get("cells", ())}
