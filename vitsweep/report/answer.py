"""The answer of a sweep: one rule says which cell is fastest, whatever shows it; and what to type next."""

import shlex
from collections.abc import Hashable, Iterator
from contextlib import suppress
from math import ceil, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep import extras
from vitsweep.errors import VitsweepError
from vitsweep.rates.profile import profile_of
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.accuracy import WORSE
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import count, missing, number, percent, plain, ratio
from vitsweep.tables.names import name_parts, varying_columns
from vitsweep.tables.render import by_numbers
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import further, may_be_drift, screened, timed_apart, windows_of
from vitsweep.tables.stats import (
    LEVEL,
    MIN_BLOCKS,
    POWER,
    Claim,
    adjusted,
    any_look_half_width,
    contrast,
    estimate,
    half_width,
    minimum_detectable_effect,
    samples,
)
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells, checked_runs, keyed, row_keys

PLAIN = "fp32"
"""The precision whose products are float32's own."""
UNKNOWN = Series({"images_per_second": float("nan")})
"""A baseline that the table does not have."""
COMPARED = (
    "sweep device images_per_second speedup speedup_low speedup_high claim claim_low claim_high family_size "
    "num_pairs block_noise baseline_cell_id speedup_note any_look precision accuracy_top1 "
    "accuracy_difference accuracy_claim accuracy_pairs"
).split()
NOISY = 0.1
"""Spread of one block's ratio that is named with a ratio that is not shown."""
LESS_ACCURATE = 0.02
"""A cell whose top-1 is lower than its baseline's by more than this is not called the winner."""
LEAST_DIFFERENCE = 0.02
"""Smaller differences are not worth the blocks that would show them."""
NEAR_SCREENING = 0.5
"""Ratio of a screening run above which a cell got no block only because the time of the command was over."""
UNMOVED = "unmoved_weights"
MOST_BLOCKS = 60
"""A difference that takes more blocks is not decided in a day's work."""
FIRST_BLOCKS = 5
"""Of a command whose noise is unknown: those of `measurement=standard`."""
UNDECIDED = (Claim.no_difference_shown, Claim.too_few_blocks, "too few repetitions")
MOST_NAMES = 3
"""Cells that are named where no difference is shown between several."""
MOST_GROUPS = 4
"""Settings that a question names."""
MOST = 8
"""The sentences are limited to this many baselines; the table shows all."""


def question(cells: DataFrame, replicated: str = "", limit_key: str = "") -> str:
    """Return a question for a sweep that has none (`sweep.question`); repetitions are no choice.

    Nor is what baselines differ in, such as the number of ranks: each of its values has an answer.
    """
    model = formatting.distinct(cells, "model") or "the model"
    if limit_key:
        return f"How large may {limit_key} be for {model}?"
    varying = [c for c in varying_columns(cells) if c != replicated]
    ids = cells.reindex(columns=["cell_id", "baseline_cell_id"])
    bases = cells[ids["cell_id"] == ids["baseline_cell_id"]]
    apart = [c for c in varying if bases[c].astype(str).nunique() > 1]
    chosen, scales = [c for c in varying if c not in apart], "world_size" in apart
    if scales and not chosen:
        return f"How does {model} scale from {formatting.span(bases['world_size'], plain)} ranks?"
    several = (chosen, apart) if chosen else (varying, [])
    groups, by = ([c.replace("_", " ") for c in some] for some in several)
    kind = "combination" if len(groups) > 1 else "setting"
    what = f"{kind} of {', '.join(groups)}" if groups else kind
    what = "combination of techniques" if len(groups) > MOST_GROUPS else what
    each = f", by {', '.join(by) if len(by) <= MOST_GROUPS else 'setting'}" if by else ""
    return f"Which {what} trains {model} fastest{each}{', and scales best' * scales}?"


class SearchResult(NamedTuple):
    """What an optional feature says of the rounds that it chose, see `extras.RESULTS`."""

    title: str
    table: DataFrame
    """First rows, as text."""
    num_more: int
    """Rows that only the report shows."""
    lines: list[str]


def search_result(tables: SweepTables) -> SearchResult | None:
    """Return the result of what chose the rounds of the latest command; None of a grid."""
    latest = tables.commands[-1] if tables.commands else {}
    has_limit = (latest.get("limit") or {}).get("key")
    search = "limit.key" if has_limit else latest.get("search")
    if search not in extras.RESULTS:
        return None
    found: SearchResult | None = extras.load(extras.RESULTS[search])(tables)
    return found


def answers(
    tables: SweepTables, cells: DataFrame | None = None, with_estimate: bool = True
) -> list[str]:
    """Return the result of a sweep in one sentence per baseline, or one where there is none.

    Of the cells of one baseline whose claim is `faster`, the one with the highest lower end is named. It is
    fastest where its paired ratio to each other one excludes 1 (Holm over them); the others are named with
    it. Where none is `faster`, no cell is named. A cell that lost accuracy is no winner. A higher estimate
    that is not shown is named as such.

    Args:
        tables: of one sweep.
        cells: some of its rows, such as those of one command; by default all, or the result of its
            search.
        with_estimate: where nothing is shown, name the highest estimate, which a paper does not.
    """
    if cells is None and (result := search_result(tables)):
        return result.lines
    cells = tables.cells if cells is None else cells
    measured, every = _measured(tables, cells)
    if measured.empty:
        return [say("nothing_measured", why=formatting.tally(every["status"]))]
    compared = measured[measured["compared"]]
    several = measured["device"].nunique() > 1
    on = measured["device"].astype(object).map(lambda device: f" on {device}" if several else "")
    placed = measured.assign(name=measured["name"].astype(object) + on)
    lost = _without_speedups(placed, compared)
    curves = scaled(tables, cells)
    if compared.empty:
        most = measured["images_per_second"].max()
        told = say("nothing_measured", why="no steps counted")
        if not missing(most):  # whichever ran first
            names = placed.loc[placed["images_per_second"] == most, "name"].sort_values()
            told = say("no_baseline", names=_listed(names), rate=number(most))
        return [told, *lost, *curves][:MOST]
    keys = row_keys(compared, "baseline_cell_id")
    where = len({key[1:] for key in keys}) > 1
    without = measured[measured["speedup"].isna()]
    top = without["images_per_second"].groupby(row_keys(without, "baseline_cell_id")).max()
    found, warned = [], dict[str, None]()
    for key, group, leaders, base in _settings(tables, cells, measured):
        is_topped = bool(top.get(key, 0) > group["images_per_second"].max())
        found.append(_over_baseline(group, leaders, base, where, is_topped, with_estimate))
        named = leaders if len(leaders) or not with_estimate else _highest(group).to_frame().T
        # weights that never moved belong to the training of a cell that is named
        unmoved = [row["name"] for _, row in named.iterrows() if row.get(UNMOVED) in (True,)]
        warned |= {f"{name}: {FLAGS[UNMOVED].caption}.": None for name in unmoved}
    said = [*found, *lost]
    if len(said) > MOST:
        said = [*filter(None, [winners(tables, cells)[0]]), *said][:MOST]
    return [*said, *curves, *[*warned][:MOST]]


def scaled(tables: SweepTables, cells: DataFrame) -> list[str]:
    """Return one sentence per scaling curve: throughput over its smallest world, and efficiency.

    At most `MOST` curves; none over several devices, or over repetitions.
    """
    if tables.replicate_key or "world_size" not in cells or cells["world_size"].nunique() < 2:
        return []
    with suppress(VitsweepError):  # several devices
        points = tables.scaling.sort_values("world_size", kind="stable")
        larger = points["world_size"] > points["reference_world_size"]
        asked = points[larger & points["cell_id"].isin(cells["cell_id"])]
        curves = asked.groupby(["scaling", "curve"], sort=False)
        return [_curve(str(name), some.to_dict("records")) for (_, name), some in curves][:MOST]
    return []


def _curve(name: str, points: list[dict[Hashable, Any]]) -> str:
    """Return the sentence of a curve; what is noted of several of its points stands at its end."""
    scaling, _, of = name.partition(" · ")
    first = count(int(points[0]["reference_world_size"]), "rank")
    known = [p for p in points if not missing(p["efficiency"])]
    sizes = [p["efficiency_family_size"] for p in known if not missing(p["efficiency_claim_low"])]
    most = int(max(sizes, default=1))
    said = "; ".join(map(_point, points)) + f" (corrected for {most} efficiencies)" * (most > 1)
    notes = dict.fromkeys(p["efficiency_note"] for p in known if p["efficiency_note"])
    said = "; ".join([said, *notes])
    return say("scaled", scaling=scaling.capitalize(), curve=of, first=first, points=said)


def _point(point: dict[Hashable, Any]) -> str:
    """Return the throughput of a point of a curve, and its efficiency with the interval among all."""
    size = ratio(point["relative_throughput"], claim=Claim.baseline)
    told = {"size": size, "ranks": count(int(point["world_size"]), "rank")}
    if missing(point["efficiency"]):
        return say("no_efficiency", why=point["efficiency_note"], **told)
    ends = (point[f"efficiency{end}"] for end in ("", "_claim_low", "_claim_high"))
    return say("efficiency", efficiency=ratio(*ends).replace("x ", " "), **told)


def best_cells(tables: SweepTables) -> list[dict[str, Any]]:
    """Return what `answers` says of each baseline as data: the named cells, or the highest estimate.

    Returns:
        One object per baseline: `baseline_cell_id`, `cell_ids` of the cells that are shown to be fastest
        (none where nothing is shown), and `best`, with `cell_id`, `claim`, `speedup`, the interval of the
        claim and the number of cells among which it holds (`claim_low, claim_high, family_size`). Empty
        where a search has a result of its own.
    """
    if search_result(tables):
        return []
    measured, _ = _measured(tables, tables.cells)
    found = []
    for _, group, leaders, _ in _settings(tables, tables.cells, measured):
        best = leaders.iloc[0] if len(leaders) else _highest(group)
        facts = ["cell_id", "claim", "speedup", "claim_low", "claim_high", "family_size"]
        named = {"cell_ids": leaders["cell_id"].tolist(), "best": best[facts].to_dict()}
        found.append({"baseline_cell_id": best["baseline_cell_id"]} | named)
    return found


def winners(tables: SweepTables, cells: DataFrame | None = None) -> tuple[str, DataFrame]:
    """Return one sentence over the settings of a sweep, and the answer of each as a row of text.

    Args:
        tables: of one sweep.
        cells: as in `answers`.

    Returns:
        "" and an empty table where cells are compared with one baseline or none, where no ratio is known, and
        where a search has a result of its own. Else `setting`, `fastest shown`, `speedup` with its own
        interval, and `result` with what `answers` says of it. Settings in which nothing could be compared
        come last.
    """
    if cells is None and search_result(tables):
        return "", DataFrame()
    cells = tables.cells if cells is None else cells
    if cells.empty:
        return "", DataFrame()
    measured, every = _measured(tables, cells)
    found = [*_settings(tables, cells, measured)]
    several = every["device"].dropna().nunique() > 1
    rows = [_winner(group, leaders, base, several) for _, group, leaders, base in found]
    rest = every[every["baseline_cell_id"].notna()]
    rest = rest[rest["baseline_cell_id"] != rest["cell_id"]]
    keys = row_keys(rest, "baseline_cell_id")
    known = {*row_keys(measured[measured["compared"]], "baseline_cell_id")}
    known |= {key[0] for key in known}  # of rows that never ran, on no device
    alone = np.array([(k if k[2] else k[0]) not in known for k in keys], dtype=bool)
    for _, some in rest[alone].groupby(keys[alone], sort=False):
        notes = [note for note in some["speedup_note"] if not missing(note) and note]
        why = notes[0] if notes else formatting.tally(some["status"])
        row = {"setting": _setting(some.iloc[0], several), "fastest shown": "none compared"}
        rows.append(row | {"speedup": "", "result": why})
    if not found or len(rows) < 2:
        return "", DataFrame()
    shown = sum(len(leaders) > 0 for _, _, leaders, _ in found)
    return say("settings_shown", shown=shown, all=len(rows)), DataFrame(rows).astype(str)


def _winner(group: DataFrame, leaders: DataFrame, base: Series, several: bool) -> dict[str, str]:
    """Return the row of one setting in `winners`."""
    first = leaders.iloc[0] if len(leaders) else _highest(group)
    label = "less accurate" if first["lost_accuracy"] else _place(first)
    name = f"none ({label}: {first['name']})"
    if len(leaders):
        name = first["name"]
        if len(leaders) > 1:
            name += f" (no difference shown: {_listed(leaders['name'].iloc[1:])})"
    return {
        "setting": _setting(first, several),
        "fastest shown": name,
        "speedup": ratio(*first[["speedup", "speedup_low", "speedup_high"]]),
        "result": f"{_claimed(first)}{_accuracy(first, base)}{_notes(first)}",
    }


def _setting(row: Series, several: bool) -> str:
    """Return what distinguishes a setting from the others, its device where there are several."""
    device = row["device"] if several and not missing(row["device"]) else ""
    return " · ".join(filter(None, (row["match"], device))) or f"baseline {row['baseline_cell_id']}"


def _measured(tables: SweepTables, cells: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return the measured cells or settings with their names, and all."""
    table = checked_cells(tables.settings_of(cells), *COMPARED)
    if len(table):
        table = table.join(name_parts(table))
    is_compared = table["speedup"].notna() & (table["claim"] != Claim.baseline)
    return table.assign(compared=is_compared)[table["status"] == Status.measured], table


def _settings(
    tables: SweepTables, cells: DataFrame, measured: DataFrame
) -> Iterator[tuple[Hashable, DataFrame, DataFrame, Series]]:
    """Yield per baseline its key, the cells compared with it, those that are named, and its row.

    Baselines that a cell is shown to beat come first, then those whose named cell has the highest lower end,
    then the smaller world.
    """
    compared = measured[measured["compared"]]
    bases = {k: row for k, (_, row) in zip(row_keys(measured), measured.iterrows(), strict=True)}
    found = []
    for key, group in compared.groupby(row_keys(compared, "baseline_cell_id"), sort=False):
        base = bases.get(key, UNKNOWN)
        own = Series([base.get("accuracy_top1")], dtype=float).iloc[0]
        difference = group["accuracy_difference"].astype(float)
        difference = difference.fillna(group["accuracy_top1"].astype(float) - own)
        lost = group["accuracy_claim"].isin([WORSE, str(Status.diverged)])
        lost |= difference < -LESS_ACCURATE  # shown to be less accurate, or so by this much
        group = group.assign(name=group["change"], lost_accuracy=lost)
        leaders = _leaders(group, cells, tables.runs)
        low = (leaders if len(leaders) else group)["claim_low"].max()
        low = float("inf") if missing(low) else -low
        order = leaders.empty, low, by_numbers(group["match"].iloc[0])
        found.append((order, (key, group, leaders, base)))
    yield from (setting for _, setting in sorted(found, key=lambda pair: pair[0]))


# The rule: which cells are named.


def _leaders(group: DataFrame, cells: DataFrame, runs: DataFrame) -> DataFrame:
    """Return the cells that are named, the first of them first; empty where no cell is shown to be faster."""
    fair = group[~group["lost_accuracy"]].sort_values(
        ["speedup_low", "speedup", "cell_id"], ascending=[False, False, True]
    )
    shown = fair[fair["claim"] == Claim.faster]
    if len(shown) < 2:
        return shown
    logs, row = _logs(shown, cells, runs)
    for place in shown.index:
        others = shown.drop(place)
        apart = _apart(logs, row[place], row[others.index])
        if not (apart["is_apart"] & (apart["speedup"] > 1)).any():  # no other is shown to be faster
            return shown.loc[[place, *others.index[~apart["is_apart"]]]]
    return shown


def _logs(shown: DataFrame, cells: DataFrame, runs: DataFrame) -> tuple[DataFrame, Series]:
    """Return log throughput per block, as `log_throughput_per_block`, and the number of each row in it.

    Of settings, it is the log of the speedup per repetition.
    """
    if "replicated" not in shown:
        cell_ids = {*shown["cell_id"], *shown["baseline_cell_id"]}
        baselines = dict(zip(shown["cell_id"], shown["baseline_cell_id"], strict=True))
        used = checked_runs(runs[runs["cell_id"].isin(cell_ids)], "device")
        known = keyed(used, baselines)
        logs = log_throughput_per_block(known.valid, ROW)
        facts = {"base": known.rows["baseline"], "window": windows_of(known.valid, ROW)}
        return logs.assign(**{c: logs[ROW].map(f) for c, f in facts.items()}), known.numbers(shown)
    [key] = {*shown["replicated"]}
    good = cells[(cells["status"] == Status.measured) & cells["speedup"].notna()]
    found = []
    for place, row in enumerate(shown.to_dict("records")):
        some = good[good["cell_id"].isin(row["cell_ids"].split(","))]
        values = {"sweep": some["sweep"], "device": row["device"], "block": some[key]}
        ratio = np.log(some["speedup"].astype(float))
        found.append(DataFrame(values | {ROW: place, "base": np.nan, "log_throughput": ratio}))
    every = pd.concat(found, ignore_index=True).assign(
        nodes_used=None, any_look=False, window=np.nan
    )
    return every, Series(range(len(shown)), shown.index)


def _apart(logs: DataFrame, leader: float, others: Series) -> DataFrame:
    """Return the ratio of each other row over the leader, and whether it excludes 1 (Holm over them).

    Of rows timed for windows of other lengths it must exclude what that may explain (`may_be_drift`).

    Rows that share fewer than `MIN_BLOCKS` blocks are compared by their ratios over the baseline, of other
    blocks each.
    """
    paired = log_ratios(logs, dict.fromkeys(others, leader), ROW)
    found = estimate(paired, ROW).set_index(ROW).reindex(others.to_numpy())
    few = found.index[~(found["num_blocks"] >= MIN_BLOCKS)]
    if len(few) and not logs["any_look"].any():
        base = dict(zip(logs[ROW], logs["base"], strict=True))
        over = samples(log_ratios(logs, base, ROW), ROW)
        for row in few:
            of_both = contrast({row: 1.0, leader: -1.0}, over)
            found.loc[row, [*of_both]] = [*of_both.values()]
    p_holm = adjusted(found["p_value"].to_numpy(float))[0]
    window = dict(zip(logs[ROW], logs["window"], strict=True))
    own = window.get(leader, nan)
    timed = [timed_apart(window.get(row, nan), own, "the first") for row in found.index]
    is_drift = may_be_drift(found.assign(timed=timed), "speedup_low", "speedup_high")
    return found.assign(is_apart=(p_holm < LEVEL) & ~is_drift).set_index(others.index)


# The words.


def _over_baseline(
    group: DataFrame,
    leaders: DataFrame,
    base: Series,
    where: bool,
    is_topped: bool,
    with_estimate: bool,
) -> str:
    """Return the answer for the cells of one baseline.

    Args:
        group: its cells.
        leaders: those that are named.
        base: the baseline.
        where: add sweep and device.
        is_topped: some cell without a speedup has a higher throughput.
        with_estimate: name the highest estimate where nothing is shown.
    """
    first = leaders.iloc[0] if len(leaders) else group.iloc[0]
    name = str(base.get("name", ""))
    against = f"the {name}" if name.startswith("baseline") else f"the baseline {name}".rstrip()
    if base.get("precision") == PLAIN and (group["precision"] != PLAIN).any():
        device = profile_of(str(base.get("device", "")))
        against += f" ({say('without_tf32')})" if device and device.has_tf32 else ""
    against += f" on {first['device']} (sweep {first['sweep']})" if where else ""
    if leaders.empty:
        return _nothing_shown(group, base, against, with_estimate)
    higher = group[(group["speedup"] > first["speedup"]) & ~group.index.isin(leaders.index)]
    higher = higher[(higher["claim"] != Claim.faster) | higher["lost_accuracy"]]
    what = "the fastest shown" if len(higher) or is_topped else "fastest"
    what += ", statistically indistinguishable" if len(leaders) > 1 else ""
    names = f"{_listed(leaders['name'])} {'is' if len(leaders) == 1 else 'are'}"
    told = {"names": names, "what": what, "base": against, "rates": _rates(first, base)}
    text = say("named", size=_sizes(leaders), **told)
    return f"{text}{_accuracy(first, base)}{_notes(first)}{_unnamed(higher, base)}."


def _nothing_shown(group: DataFrame, base: Series, against: str, with_estimate: bool) -> str:
    """Return the sentence where no cell is named: the highest estimate, and why it shows nothing."""
    faster = _less_accurate(group)
    if len(faster):
        return say("none_shown", base=against, best=_unnamed(faster, base))
    if not with_estimate:
        return say("none_shown", base=against, best="")
    best = _highest(group)
    estimate = f"{_size(best)}, {_rates(best, base)}{_accuracy(best, base)}"
    told = {"name": best["name"], "which": f"the {_place(best)}", "others": ""}
    text = say("estimate", size=estimate, why=_claimed(best) + _notes(best), **told)
    return say("none_shown", base=against, best=f"; {text}")


def _place(best: Series) -> str:
    """Return which estimate is the highest of the cells, where that of the baseline is 1."""
    return "highest" if best["speedup"] >= 1 else "next highest"


def _less_accurate(group: DataFrame) -> DataFrame:
    return group[group["lost_accuracy"] & (group["claim"] == Claim.faster)]


def _highest(group: DataFrame) -> Series:
    """Return the cell that is spoken of where none is named."""
    faster = _less_accurate(group)
    rows = faster if len(faster) else group
    return rows.sort_values(["speedup", "cell_id"], ascending=[False, True]).iloc[0]


def _claimed(row: Series) -> str:
    claim = str(row["claim"])
    if row["claim"] == Claim.no_difference_shown and row["block_noise"] > NOISY:
        unit = row.get("replicated", "block")
        claim += f", {say('noisy', noise=100 * row['block_noise'], unit=unit)}"
    return claim


def _unnamed(rows: DataFrame, base: Series) -> str:
    """Return why cells with a higher estimate are not named as the fastest."""
    text = ""
    for is_less_accurate, some in rows.groupby("lost_accuracy"):
        row = some.sort_values(["speedup", "cell_id"], ascending=[False, True]).iloc[0]
        more = len(some) - 1
        others = f"; likewise {count(more, 'other cell')}" if more else ""
        told = {"name": row["name"], "size": _size(row), "others": others, "which": "a higher"}
        if is_less_accurate:
            told |= {"claim": row["claim"], "accuracy": _accuracy(row, base)}
            text += f"; {say('less_accurate', **told)}"
        else:
            text += f"; {say('estimate', why=_claimed(row) + _notes(row), **told)}"
    return text


def _accuracy(row: Series, base: Series) -> str:
    """Return the accuracy next to the baseline's, where it was measured."""
    own, other = row["accuracy_top1"], base.get("accuracy_top1")
    if missing(own) and missing(other):
        return ""
    pairs = row["accuracy_pairs"]
    how = "one seed" if missing(pairs) or pairs < 2 else f"{pairs:.0f} {row['replicated']}s"
    claim = "" if missing(row["accuracy_claim"]) else f": {row['accuracy_claim']}"
    ends = ("not measured" if missing(v) else percent(v) for v in (own, other))
    return f", {say('accuracy', own=next(ends), base=next(ends), how=how + claim)}"


def _notes(row: Series) -> str:
    """What belongs to the ratio: missing blocks, other code, another size."""
    return f"; {note}" if (note := further(row)) else ""


def _size(row: Series) -> str:
    """Return the speedup with its interval among all cells, or the words that there is none."""
    if row["claim"] == Claim.screened:
        return screened(row["speedup"])
    over = measured_over(row)
    if missing(row["speedup_high"]):
        blocks = f" over {over}" if row["num_pairs"] > 0 else ""
        return f"{ratio(row['speedup'])}{blocks}"
    size, noun = row["family_size"], "setting" if "replicated" in row else "cell"
    cells = f"{size:.0f} {noun}s" if not missing(size) and size > 1 else ""
    if missing(row["claim_high"]) and cells:  # of so few blocks an any-look interval is infinite
        return (
            f"{ratio(row['speedup'], claim=Claim.baseline)} over {over} (no interval among {cells})"
        )
    corrected = f" (corrected for {cells})" if cells else ""
    return f"{ratio(row['speedup'], row['claim_low'], row['claim_high'])} over {over}{corrected}"


def measured_over(row: dict[Any, Any] | Series) -> str:
    """Return over how many blocks or repetitions a ratio was measured."""
    if "replicated" in row:
        return count(row["replicates"], str(row["replicated"]))
    return count(row["num_pairs"], "block")


def _sizes(rows: DataFrame) -> str:
    """Return the speedups of the cells that are named, with their names where they are several."""
    if len(rows) == 1:
        return _size(rows.iloc[0])
    return ", ".join(f"{row['name']} {_size(row)}" for _, row in rows.head(MOST_NAMES).iterrows())


def _listed(names: Series) -> str:
    shown, more = names.head(MOST_NAMES).tolist(), len(names) - MOST_NAMES
    last = count(more, "other cell") if more > 0 else shown.pop()
    return f"{', '.join(shown)} and {last}" if shown else last


def _rates(row: Series, base: Series) -> str:
    return " against ".join(number(r["images_per_second"]) for r in (row, base)) + " img/s"


def _without_speedups(measured: DataFrame, compared: DataFrame) -> list[str]:
    """Return what has no speedup, with the reason: of each baseline the fastest, or the fastest of all."""
    noted = measured[measured["speedup"].isna() & measured["speedup_note"].fillna("").ne("")]
    keys = row_keys(noted, "baseline_cell_id")
    alone = ~keys.isin(row_keys(compared, "baseline_cell_id"))
    first = noted.sort_values(["images_per_second", "cell_id"], ascending=[False, True])
    found = [rows.iloc[0] for _, rows in first[alone].groupby(keys[alone], sort=False)]
    most = first[~alone].head(1)
    found += [
        r
        for _, r in most.iterrows()
        if r["images_per_second"] > compared["images_per_second"].max()
    ]
    return [
        say(
            "not_compared",
            name=r["name"],
            rate=number(r["images_per_second"]),
            note=r["speedup_note"],
        )
        for r in found
    ]


def next_command(settings: DataFrame, typed: str, cells: DataFrame | None = None) -> str:
    """Return a sentence with the command that makes the answer surer.

    It asks for the blocks, or the repetitions, at which a difference of 2 % is shown at the first level of
    Holm's method with the median noise of what is undecided, whatever the estimates are.

    Args:
        settings: cells of one command, or settings over their repetitions, one row each.
        typed: that command.
        cells: of settings, the cells.

    Returns:
        Empty where something is shown to be faster than each baseline, or everything to be slower; where so
        many blocks were measured; and after `retry`, which adds no blocks.
    """
    if "vitsweep retry" in typed:
        return ""
    measured = checked_cells(settings, *COMPARED, "run_seconds", "launcher")
    measured = measured[(measured["status"] == Status.measured) & measured["speedup"].notna()]
    answered = measured.loc[measured["claim"] == Claim.faster, "baseline_cell_id"]
    left = measured[~measured["baseline_cell_id"].isin(answered)]
    unsure = left[left["claim"].isin(UNDECIDED)]
    if unsure.empty:
        waits = (left["claim"] == Claim.screened) & (left["speedup"] > NEAR_SCREENING)
        return say("surer", command=typed, minutes="") if waits.any() else ""
    key = str(unsure["replicated"].iloc[0]) if "replicated" in unsure else ""
    noise = unsure.loc[unsure["claim"] == Claim.no_difference_shown, "block_noise"].median()
    any_look = bool(unsure["any_look"].eq(True).any())
    if missing(noise):
        return say("surer", command=_more(typed, FIRST_BLOCKS, key, cells, any_look), minutes="")
    wanted = _wanted(float(noise), max(int(unsure["family_size"].fillna(1).max()), 1), any_look)
    if wanted > MOST_BLOCKS:
        most = count(MOST_BLOCKS, key or "block")
        return say("undecidable", most=most, difference=100 * LEAST_DIFFERENCE)
    done = int(unsure["replicates" if key else "num_pairs"].min())
    if wanted <= done:
        return ""
    minutes = (wanted - done) * _seconds(measured if cells is None else cells, key) / 60
    command = _more(typed, wanted, key, cells, any_look, minutes)
    about = "" if missing(minutes) else f", about {ceil(minutes)} min"
    return say("surer", command=command, minutes=about)


def _wanted(noise: float, size: int, any_look: bool) -> int:
    """Return how many blocks show `LEAST_DIFFERENCE` among so many cells; `MOST_BLOCKS` + 1 for more."""
    for blocks in range(MIN_BLOCKS, MOST_BLOCKS + 1):
        if any_look:
            half = any_look_half_width(noise, blocks, LEVEL / size)
            half += half_width(noise / sqrt(blocks), blocks - 1.0, 2 * (1 - POWER))
            least = float(np.expm1(half))
        else:
            least = minimum_detectable_effect(blocks, size, noise)
        if least <= LEAST_DIFFERENCE:
            return blocks
    return MOST_BLOCKS + 1


def _seconds(cells: DataFrame, key: str) -> float:
    """Return how long one more block of all cells takes here, or one more repetition; NaN where unknown."""
    known = checked_cells(cells, "run_seconds", "launcher", "blocks", "claim")
    known = known[(known["status"] == Status.measured) & (known["claim"] != Claim.screened)]
    if not known["launcher"].eq("local").all():
        return nan
    seconds = known["run_seconds"].astype(float)
    return float((seconds * known["blocks"]).sum() / known[key].nunique() if key else seconds.sum())


def _more(
    typed: str,
    wanted: int,
    key: str,
    cells: DataFrame | None,
    any_look: bool,
    minutes: float = nan,
) -> str:
    """Return a command with so many blocks, repetitions, or minutes."""
    name, value = "measurement.blocks", str(wanted)
    if key and cells is not None:
        known = sorted({int(v) for v in cells[key].dropna()})
        added = range(known[-1] + 1, known[-1] + 1 + max(wanted - len(known), 0))
        name, value = key, ",".join(map(str, [*known, *added]))
    elif any_look:
        if missing(minutes):
            return typed
        name, value = "sweep.minutes", str(ceil(minutes))
    words = [w for w in shlex.split(typed) if not w.lstrip("+").startswith(f"{name}=")]
    return shlex.join([*words, f"{name}={value}"])
