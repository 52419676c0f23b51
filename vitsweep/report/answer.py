"""The answer of a sweep: one rule says which cell is fastest, whatever shows it; and what to type next."""

from collections.abc import Hashable, Iterator
from math import ceil, log
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep import extras
from vitsweep.rates.profile import profile_of
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import Status
from vitsweep.tables import formatting
from vitsweep.tables.accuracy import WORSE
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.formatting import count, missing, number, percent, ratio
from vitsweep.tables.limits import limit_answer
from vitsweep.tables.names import name_parts, varying_columns
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import further, may_be_drift, screened, timed_apart, windows_of
from vitsweep.tables.stats import (
    LEVEL,
    MIN_BLOCKS,
    Claim,
    adjusted,
    contrast,
    estimate,
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
CLEAR = 1.01
"""Lower end of a speedup's interval above which no further block is named."""
NEAR_SCREENING = 0.5
"""Ratio of a screening run above which a cell got no block only because the time of the command was over."""
UNMOVED = "unmoved_weights"
MOST_BLOCKS = 60
SURER = "To be surer: `{}`."
MOST_NAMES = 3
"""Cells that are named where no difference is shown between several."""
MOST_GROUPS = 4
"""Settings that a question names."""
MOST = 8
"""The sentences are limited to this many baselines; the table shows all."""


def question(cells: DataFrame, replicated: str = "") -> str:
    """Return a question for a sweep that has none (`sweep.question`); repetitions are no choice."""
    groups = [c.replace("_", " ") for c in varying_columns(cells) if c != replicated]
    kind = "combination" if len(groups) > 1 else "setting"
    what = f"{kind} of {', '.join(groups)}" if groups else kind
    what = "combination of techniques" if len(groups) > MOST_GROUPS else what
    return f"Which {what} trains {formatting.distinct(cells, 'model') or 'the model'} fastest?"


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
    search = tables.commands[-1].get("search") if tables.commands else "grid"
    if search not in extras.RESULTS:
        return None
    found: SearchResult | None = extras.load(extras.RESULTS[search])(tables)
    return found


def answers(tables: SweepTables, cells: DataFrame | None = None) -> list[str]:
    """Return the result of a sweep in one sentence per baseline, or one where there is none.

    Of the cells of one baseline whose claim is `faster`, the one with the highest lower end is named. It is
    fastest where its paired ratio to each other one excludes 1 (Holm over them); the others are named with
    it. Where none is `faster`, those that are `probably faster` are named; else no cell is. A cell that lost
    accuracy is no winner. A higher estimate that is not shown is named as such.

    Args:
        tables: of one sweep.
        cells: some of its rows, such as those of one command; by default all, or the result of its
            search.
    """
    if cells is None and tables.limit_key:
        return [limit_answer(tables.limits, tables.limit_key)]
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
    if compared.empty:
        return [_fastest(placed), *lost][:MOST]
    keys = row_keys(compared, "baseline_cell_id")
    where = len({key[1:] for key in keys}) > 1
    without = measured[measured["speedup"].isna()]
    top = without["images_per_second"].groupby(row_keys(without, "baseline_cell_id")).max()
    found = []
    for key, group, leaders, base in _settings(tables, cells, measured):
        is_topped = bool(top.get(key, 0) > group["images_per_second"].max())
        found.append(_over_baseline(group, leaders, base, where, is_topped))
    if len(lost) + len(found) > MOST:
        return [*[*found, *lost][: MOST - 1], winners(tables, cells)[0]]
    return [*lost, *found]


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
    if cells is None and (tables.limit_key or search_result(tables)):
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
    others = rest[alone].groupby(keys[alone], sort=False)
    rows += [_not_compared(some, several) for _, some in others]
    if not found or len(rows) < 2:
        return "", DataFrame()
    shown = sum((leaders["claim"] == Claim.faster).any() for _, _, leaders, _ in found)
    return say("settings_shown", shown=shown, all=len(rows)), DataFrame(rows).astype(str)


def _winner(group: DataFrame, leaders: DataFrame, base: Series, several: bool) -> dict[str, str]:
    """Return the row of one setting in `winners`."""
    first = leaders.iloc[0] if len(leaders) else _highest(group)
    label = "probably" if len(leaders) else "less accurate" if first["lost_accuracy"] else "highest"
    name = f"none ({label}: {first['name']})"
    if first["claim"] == Claim.faster and len(leaders):
        name = first["name"]
        if len(leaders) > 1:
            name += f" (no difference shown: {_listed(leaders['name'].iloc[1:])})"
    return {
        "setting": _setting(first, several),
        "fastest shown": name,
        "speedup": ratio(*first[["speedup", "speedup_low", "speedup_high"]]),
        "result": f"{_claimed(first)}{_accuracy(first, base)}{_notes(first)}",
    }


def _not_compared(rows: DataFrame, several: bool) -> dict[str, str]:
    """Return the row of a setting without a ratio in `winners`."""
    notes = [note for note in rows["speedup_note"] if not missing(note) and note]
    why = notes[0] if notes else formatting.tally(rows["status"])
    named = {"setting": _setting(rows.iloc[0], several), "fastest shown": "none compared"}
    return named | {"speedup": "", "result": why}


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
    """Yield per baseline its key, the cells compared with it, those that are named, and its row."""
    compared = measured[measured["compared"]]
    bases = {k: row for k, (_, row) in zip(row_keys(measured), measured.iterrows(), strict=True)}
    for key, group in compared.groupby(row_keys(compared, "baseline_cell_id"), sort=False):
        base = bases.get(key, UNKNOWN)
        group = group.assign(name=group["change"], lost_accuracy=_lost_accuracy(group, base))
        yield key, group, _leaders(group, cells, tables.runs), base


# The rule: which cells are named.


def _lost_accuracy(group: DataFrame, base: Series) -> Series:
    """Tell which cells are shown to be less accurate than their baseline, or are so by `LESS_ACCURATE`."""
    own = Series([base.get("accuracy_top1")], dtype=float).iloc[0]
    difference = group["accuracy_difference"].astype(float)
    difference = difference.fillna(group["accuracy_top1"].astype(float) - own)
    return group["accuracy_claim"].isin([WORSE, str(Status.diverged)]) | (
        difference < -LESS_ACCURATE
    )


def _leaders(group: DataFrame, cells: DataFrame, runs: DataFrame) -> DataFrame:
    """Return the cells that are named, the first of them first; empty where no cell is shown to be faster."""
    fair = group[~group["lost_accuracy"]].sort_values(
        ["speedup_low", "speedup", "cell_id"], ascending=[False, False, True]
    )
    shown = fair[fair["claim"] == Claim.faster]
    if len(shown) < 2:
        return shown if len(shown) else fair[fair["claim"] == Claim.probably_faster]
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
    timed = [timed_apart(window[row], window[leader], "the first") for row in found.index]
    is_drift = may_be_drift(found.assign(timed=timed), "speedup_low", "speedup_high")
    return found.assign(is_apart=(p_holm < LEVEL) & ~is_drift).set_index(others.index)


# The words.


def _over_baseline(
    group: DataFrame, leaders: DataFrame, base: Series, where: bool, is_topped: bool
) -> str:
    """Return the answer for the cells of one baseline.

    Args:
        group: its cells.
        leaders: those that are named.
        base: the baseline.
        where: add sweep and device.
        is_topped: some cell without a speedup has a higher throughput.
    """
    first = leaders.iloc[0] if len(leaders) else group.iloc[0]
    name = str(base.get("name", ""))
    against = f"the {name}" if name.startswith("baseline") else f"the baseline {name}".rstrip()
    against += _without_tf32(group, base)
    against += f" on {first['device']} (sweep {first['sweep']})" if where else ""
    if leaders.empty:
        return _nothing_shown(group, base, against)
    higher = group[(group["speedup"] > first["speedup"]) & ~group.index.isin(leaders.index)]
    higher = higher[(higher["claim"] != Claim.faster) | higher["lost_accuracy"]]
    is_probable = first["claim"] == Claim.probably_faster
    what = "probably faster" if is_probable else "fastest"
    if len(leaders) > 1 and not is_probable:
        what += ", statistically indistinguishable"
    if len(higher) or is_topped:
        what = what.replace("fastest", "the fastest shown")
    names = f"{_listed(leaders['name'])} {'is' if len(leaders) == 1 else 'are'}"
    told = {"names": names, "what": what, "base": against, "rates": _rates(first, base)}
    text = say("named", size=_sizes(leaders), **told)
    return f"{text}{_accuracy(first, base)}{_notes(first)}{_unnamed(higher, base)}."


def _without_tf32(group: DataFrame, base: Series) -> str:
    """Return a remark on a baseline of float32 where precision varies on a GPU that has TF32."""
    varies = base.get("precision") == PLAIN and (group["precision"] != PLAIN).any()
    device = profile_of(str(base.get("device", ""))) if varies else None
    return f" ({say('without_tf32')})" if device and device.has_tf32 else ""


def _nothing_shown(group: DataFrame, base: Series, against: str) -> str:
    """Return the sentence where no cell is named: the highest estimate, and why it shows nothing."""
    faster = _less_accurate(group)
    if len(faster):
        return say("none_shown", base=against, best=_unnamed(faster, base)[2:])
    best = _highest(group)
    estimate = f"{_size(best)}, {_rates(best, base)}{_accuracy(best, base)}"
    told = {"name": best["name"], "which": "the highest", "others": ""}
    text = say("estimate", size=estimate, why=_claimed(best) + _notes(best), **told)
    return say("none_shown", base=against, best=text)


def _less_accurate(group: DataFrame) -> DataFrame:
    faster = group["claim"].isin([Claim.faster, Claim.probably_faster])
    return group[group["lost_accuracy"] & faster]


def _highest(group: DataFrame) -> Series:
    """Return the cell that is spoken of where none is named."""
    faster = _less_accurate(group)
    rows = faster if len(faster) else group
    return rows.sort_values(["speedup", "cell_id"], ascending=[False, True]).iloc[0]


def _claimed(row: Series) -> str:
    claim = str(row["claim"])
    if row["claim"] == Claim.no_difference_shown and row["block_noise"] > NOISY:
        claim += f", {say('noisy', noise=100 * row['block_noise'])}"
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
    """What belongs to the ratio: missing blocks, other code, another size, weights that never moved."""
    unmoved = FLAGS[UNMOVED].caption if row.get(UNMOVED) in (True,) else ""
    return "".join(f"; {note}" for note in (further(row), unmoved) if note)


def _size(row: Series) -> str:
    """Return the speedup with its interval among all cells, or the words that there is none."""
    if row["claim"] == Claim.screened:
        return screened(row["speedup"])
    over = measured_over(row)
    if missing(row["speedup_high"]):
        blocks = f" over {over}" if row["num_pairs"] > 0 else ""
        return f"{ratio(row['speedup'])}{blocks}"
    size, ends = row["family_size"], (row["claim_low"], row["claim_high"])
    if missing(ends[0]) or missing(size):
        size, ends = 1, (row["speedup_low"], row["speedup_high"])
    noun = "setting" if "replicated" in row else "cell"
    corrected = f" (corrected for {size:.0f} {noun}s)" if size > 1 else ""
    return f"{ratio(row['speedup'], *ends)} over {over}{corrected}"


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


def _fastest(measured: DataFrame) -> str:
    """Return which cells had the highest throughput where nothing was compared, whichever ran first."""
    most = measured["images_per_second"].max()
    if missing(most):
        return say("nothing_measured", why="no steps counted")
    names = measured.loc[measured["images_per_second"] == most, "name"].sort_values()
    return say("no_baseline", names=_listed(names), rate=number(most))


def next_command(cells: DataFrame, typed: str) -> str:
    """Return a sentence with the command that makes the answer surer.

    Args:
        cells: of one command, one row each.
        typed: that command.

    Returns:
        Empty where the fastest cell is known and clearly faster than its baseline, where every cell is
        slower, and after `retry`, which adds no blocks.
    """
    if "vitsweep retry" in typed:
        return ""
    measured = checked_cells(cells, *COMPARED)
    measured = measured[(measured["status"] == Status.measured) & measured["speedup"].notna()]
    compared = measured[~measured["claim"].isin([Claim.baseline, Claim.screened])]
    for claim in (Claim.faster, Claim.probably_faster):
        best = compared[compared["claim"] == claim].nlargest(1, "speedup_low")
        if len(best):
            is_clear = claim == Claim.faster and best["speedup_low"].iloc[0] >= CLEAR
            return "" if is_clear else _surer(best.iloc[0], typed)
    if (compared.nlargest(1, "speedup")["claim"] == Claim.missing_blocks).any():
        return ""
    unsure = compared[compared["claim"].isin([Claim.no_difference_shown, Claim.too_few_blocks])]
    if len(unsure):
        return _surer(unsure.nlargest(1, "speedup").iloc[0], typed)
    screened = measured[measured["claim"] == Claim.screened]
    if (screened["speedup"] > NEAR_SCREENING).any():
        return SURER.format(typed)
    return ""


def _surer(best: Series, typed: str) -> str:
    """Return the command that gives the cell more blocks: as many as show its present difference."""
    if not missing(best["any_look"]) and best["any_look"]:
        return SURER.format(typed)
    difference, done = max(abs(log(best["speedup"])), LEAST_DIFFERENCE), int(best["num_pairs"])
    half, wanted = log(best["speedup_high"] / best["speedup"]), 2 * done
    if half == half:
        wanted = ceil(done * (half / difference) ** 2)
    if wanted > MOST_BLOCKS:
        return ""
    words = [w for w in typed.split() if not w.startswith("measurement.blocks=")]
    return SURER.format(f"{' '.join(words)} measurement.blocks={max(wanted, done + 3)}")
