"""Sentences next to a table: why cells were not measured, and why metrics are empty."""

from collections.abc import Mapping, Sequence

from pandas import DataFrame, Series

from vitsweep.results.metrics import own_metrics
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, cut_at_word, missing, plain, status_words, text_rows
from vitsweep.tables.names import varying_columns
from vitsweep.tables.sentences import say

LONGEST_REASON = 300
"""Characters that a sentence shows of what a function raised or returned."""


def empty_metrics(runs: DataFrame) -> list[str]:
    """Return one sentence for each of the user's metrics that could not be computed in some runs.

    Args:
        runs: one row per run; those that were measured before a metric was defined do not count.
    """
    if "status" not in runs:
        return []
    measured = runs[runs["status"] == Status.measured]
    known = [c for c in own_metrics(runs) if {c, f"{c}_reason"} <= set(measured.columns)]
    return [_sentence(c, measured) for c in known if measured[f"{c}_reason"].notna().any()]


def _sentence(column: str, measured: DataFrame) -> str:
    reason = f"{column}_reason"
    empty = measured[reason].notna()
    computed = empty | measured[column].notna()
    reasons = measured.loc[empty, reason].map(lambda text: " ".join(str(text).split()))
    common, *others = reasons.value_counts().index
    shown = cut_at_word(common, LONGEST_REASON)
    more = count(len(others), "more reason")
    return say(
        "no_metric",
        metric=column,
        empty=f"{empty.sum():,}",
        runs=count(computed.sum(), "run"),
        reason=shown.removesuffix("."),
        more=f" {more} in `{reason}` of `runs.parquet`." if others else "",
    )


START = "measurement.start"
"""How the ranks of a run began: forked ones share the memory of what a server has imported."""


def known_starts(table: DataFrame) -> Series:
    """Return how the ranks of each row were started, which early records do not hold.

    Then they were spawned where `runtime.variables` is set, and forked elsewhere.

    Args:
        table: cells or runs.
    """
    variables = [c for c in table if f"{c}.".startswith("runtime.variables.")]
    is_spawned = ~table[variables].map(missing).all(axis=1)
    inferred = is_spawned.map({True: "spawned", False: "forked"}).astype(object)
    return table[START].fillna(inferred) if START in table else inferred


def starts(runs: DataFrame, by: str) -> Series:
    """Return how the ranks of runs that have a resident memory were started, such as `forked spawned`.

    Args:
        runs: one row per run.
        by: column that groups them.
    """
    if "peak_rss_gib" not in runs:
        return Series(dtype=object)
    known = runs[runs["peak_rss_gib"].notna()]
    known = known.assign(**{START: known_starts(known)})
    return known.groupby(by, observed=True)[START].unique().map(sorted).str.join(" ")


def two_starts(own: object, other: object, whose: str) -> str:
    """Say that the memory of two cells or sides is not that of ranks which began alike; "" where it is.

    Args:
        own: `forked`, `spawned`, or both in one text.
        other: the same of what it is compared with.
        whose: whose ranks the other ones are.
    """
    if missing(own) or missing(other) or len({*str(own).split(), *str(other).split()}) < 2:
        return ""
    own, other = (str(side).replace(" ", " and ") for side in (own, other))
    return say("two_starts", own=own, whose=whose, other=other)


# Cells that share a reason, in one line instead of one long row each.

Settings = Mapping[str, str]
"""Key -> value of what distinguishes a cell from the others."""


def lines_of(cells: DataFrame, chosen: Series) -> list[str]:
    """Return one line per status and reason of the chosen cells; the others distinguish them."""
    if not chosen.any():
        return []
    columns = varying_columns(cells)
    rows = zip(cells["status"], cells["reason"], chosen, strict=True)
    return reason_lines(
        text_rows(cells[columns]),
        [_reason(status, reason) if is_chosen else "" for status, reason, is_chosen in rows],
    )


def _reason(status: object, reason: object) -> str:
    word = status_words(status)
    text = " ".join(plain(reason).split())
    return f"{word}: {text}" if text else word


def reason_lines(settings: Sequence[Settings], reasons: Sequence[str]) -> list[str]:
    """Return one line per reason, "4 cells with `sharding=none`: ...", in order of appearance.

    Args:
        settings: of every cell, those without a reason too: they tell what a group has in common
            that the other cells do not have.
        reasons: of every cell; empty for a cell that has none.
    """
    groups: dict[str, list[int]] = {}
    for index, reason in enumerate(reasons):
        if reason:
            groups.setdefault(reason, []).append(index)
    return [
        f"{count(len(members), 'cell')}{_common(settings, members)}: {reason}"
        for reason, members in groups.items()
    ]


def _common(settings: Sequence[Settings], members: Sequence[int]) -> str:
    """Return the fewest settings that all members share and that distinguish them from other cells.

    Each setting is the one that leaves out most of the cells which fit so far; where no setting
    tells the members from the rest, those that come nearest are named.
    """
    first, inside = settings[members[0]], set(members)
    others = [cell for index, cell in enumerate(settings) if index not in inside]
    shared = [k for k, v in first.items() if v and all(settings[i].get(k) == v for i in members)]
    named: list[str] = []
    while others and shared:
        best = min(shared, key=lambda key: sum(cell.get(key) == first[key] for cell in others))
        left = [cell for cell in others if cell.get(best) == first[best]]
        if len(left) == len(others):
            break
        named, others = [*named, best], left
    return f" with `{' '.join(f'{key}={first[key]}' for key in named)}`" if named else ""
