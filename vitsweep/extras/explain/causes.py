"""Why one cell is faster than another: causes that add up to the measured difference (`vitsweep explain`)."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.extras.explain.kernel_kinds import BETWEEN, POOLED, TimeClass
from vitsweep.extras.explain.roofline import plain_rows
from vitsweep.results.record import RunRecord, Status
from vitsweep.tables.formatting import (
    Column,
    count,
    missing,
    number,
    text_columns,
    values,
    with_interval,
)
from vitsweep.tables.names import names_by_id
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import LEVEL, Claim, adjusted, half_width, mean_interval, two_sided
from vitsweep.tables.sweep_tables import SweepTables

Floats = NDArray[np.float64]
Operator = tuple[str, str, str]
"""Class, name, and shapes of the inputs."""

TRACING, REST = "tracing itself", "rest"
AMOUNTS = ("ms", "calls")
"""What a trace says of an operator."""
MOST_NAMED = 3
"""Causes that the sentence names."""
LEAST_BLOCKS = 5
"""Fewer blocks show no cause."""
LEAST_SHARE = 0.01
"""Causes that take less of a step in both cells are not tested."""
SMALL_SHARE = 0.002
"""Operators below this share of a step are shown as one row of their class."""
LATE = 0.02
"""Waiting for one rank above this share of a step is reported."""


@dataclass(frozen=True)
class TracedRun:
    """A run with traced steps, on its critical rank; all per step.

    Attributes:
        step_ms: over the untraced window.
        plain_ms: of steps without the profiler just before the traced ones.
        operators: `AMOUNTS` of each operator; the milliseconds add up to a traced step.
        images_per_second: over the untraced window.
        critical_rank: the rank that the others wait for.
        waited_ms: what each of the others waits for it, on average; 0 where there are none.
    """

    step_ms: float
    plain_ms: float
    operators: Mapping[Operator, Floats]
    images_per_second: float
    critical_rank: int
    waited_ms: float

    @cached_property
    def classes(self) -> Mapping[str, Floats]:
        """`AMOUNTS` of each class."""
        found: defaultdict[str, Floats] = defaultdict(lambda: np.zeros(len(AMOUNTS)))
        for (kind, _, _), amounts in self.operators.items():
            found[kind] += amounts
        return found

    @property
    def added_by_tracing(self) -> float:
        """What tracing adds to a step, in milliseconds."""
        return float(sum(ms for ms, _ in self.classes.values())) - self.plain_ms


def traced_run(record: RunRecord) -> TracedRun | None:
    """Return what a record keeps of traced steps; None where it has none, or none that can be read."""
    trace, step_ms = record.samples.get("trace"), record.metrics.get("step_time_ms")
    if record.status != Status.measured or not trace or not step_ms:
        return None
    try:
        critical = int(trace["critical_rank"])
        every = [dict(zip(trace["columns"], row, strict=True)) for row in trace["rows"]]
        rows = [row for row in every if row["rank"] == critical]
        steps = len({row["step"] for row in rows})
        operators: dict[Operator, Floats] = defaultdict(lambda: np.zeros(len(AMOUNTS)))
        for row in rows:
            key = str(row["class"]), str(row["operator"]), str(row["shapes"])
            operators[key] += [float(row[c]) / steps for c in AMOUNTS]
        others = [row for row in every if row["rank"] != critical]
        waited = sum(row["ms"] for row in others if row["class"] == TimeClass.ranks)
        return TracedRun(
            step_ms=step_ms,
            plain_ms=float(trace["plain_ms"]),
            operators=operators,
            images_per_second=float(record.metrics.get("images_per_second") or nan),
            critical_rank=critical,
            waited_ms=waited / steps / max(len({row["rank"] for row in others}), 1),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


Pair = tuple[TracedRun, TracedRun]


def traced_pairs(records: Iterable[RunRecord], variant: str, baseline: str) -> list[Pair]:
    """Return the traced runs of both cells in each block that traced both, in order.

    Of several devices or states of the code, the pairs of the latest one count.
    """
    found: dict[tuple[str, ...], dict[str, TracedRun]] = {}
    for record in sorted(records, key=lambda r: str(r.environment.get("started_at") or "")):
        traced = traced_run(record) if record.cell_id in (variant, baseline) else None
        if traced:
            place = str(record.environment.get("device")), record.sweep, record.block
            found.setdefault(place, {})[record.cell_id] = traced
    whole = {k: runs for k, runs in found.items() if {variant, baseline} <= runs.keys()}
    device = [*whole][-1][0] if whole else ""
    return [(r[variant], r[baseline]) for key, r in whole.items() if key[0] == device]


@dataclass(frozen=True, eq=False)
class Explanation:
    """Why cell A takes another time per step than cell B.

    Attributes:
        names: of A and B.
        difference: milliseconds per step, A minus B, over the untraced windows, with its 95 % interval.
        speedup: throughput of A over that of B in the same blocks.
        step_ms: of A and of B, over the untraced windows.
        num_blocks: blocks that traced both.
        causes: one row per cause, `tracing itself` and `rest` last: `cause, ms, low, high, shown`, the
            milliseconds and calls of A and B, and the change of the number of `launches`. `ms` adds up to
            the difference. Intervals and `shown` hold among all causes above 1 % of a step (Holm); the
            others, and all below 5 blocks, have no interval.
        blocks: the milliseconds of each cause, one row per block.
        operators: one row per operator and shapes of its inputs, the largest difference first: `class,
            operator, shapes, ms, low, high, shown`, and for A and B milliseconds and calls, all per step on
            the critical rank.
        notes: what else is known, in sentences.
    """

    names: tuple[str, str]
    difference: tuple[float, float, float]
    speedup: float
    step_ms: tuple[float, float]
    num_blocks: int
    causes: DataFrame
    blocks: DataFrame
    operators: DataFrame
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> dict[str, Any]:
        """The measured difference as a row like those of `causes`."""
        steps = {"a_ms": self.step_ms[0], "b_ms": self.step_ms[1]}
        return {"cause": "measured difference", **_ends(self.difference), **steps, "launches": 0.0}

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        ms, low, high = self.difference
        claim = Claim.slower if low > 0 else Claim.faster if high < 0 else Claim.no_difference_shown
        causes = self.causes[~self.causes["cause"].isin([TRACING, REST])]
        causes = causes.sort_values("ms", key=abs, ascending=False)
        named = causes[causes["shown"]].head(MOST_NAMED)
        parts = [
            f"{signed(row['ms'])} ms [{signed(row['low'])}, {signed(row['high'])}] {row['cause']}"
            for row in named.to_dict("records")
        ]
        if self.num_blocks < LEAST_BLOCKS and len(causes):
            largest = f"{signed(causes['ms'].iloc[0])} ms {causes['cause'].iloc[0]}"
            parts = [say("largest_cause", cause=largest, blocks=LEAST_BLOCKS)]
        interval = "(no interval)" if missing(low) else f"[{signed(low)}, {signed(high)}]"
        return say(
            "explained",
            a=self.names[0],
            b=self.names[1],
            ms=f"{signed(ms)} ms {interval}",
            blocks=count(self.num_blocks, "block"),
            claim=Claim.too_few_blocks if missing(low) else claim,
            causes=", ".join(parts) or "no cause shown",
        )

    def texts(self, operators: int = 0) -> dict[str, DataFrame]:
        """Return title -> table as the terminal shows it.

        Args:
            operators: rows of the table of operators; 0 for none.
        """
        found = {"Causes, A | B": cause_text(self)}
        if operators > 0:
            found["Operators, A | B"] = operator_text(self, operators)
        return found

    def json(self) -> dict[str, Any]:
        """Return it as plain values for `--json`."""
        ms, low, high = (None if missing(end) else end for end in self.difference)
        columns = ["cause", "ms", "low", "high", "launches"]
        return {
            "a": self.names[0],
            "b": self.names[1],
            "difference_ms": ms,
            "difference_low_ms": low,
            "difference_high_ms": high,
            "speedup": self.speedup,
            "blocks": self.num_blocks,
            "causes": plain_rows(self.causes[columns]),
            "operators": plain_rows(self.operators),
            "notes": [*self.notes],
        }


def signed(value: float) -> str:
    """Return milliseconds with their sign, `+1.23` or `-18.4`; the empty text where they are missing."""
    if missing(value):
        return ""
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return "0" if abs(value) < 0.005 else f"{value:+,.{places}f}"


DIFFERENCE = with_interval("ms", signed, signed, "{}")
"""Texts of milliseconds that A takes more than B."""


def explained(pairs: Sequence[Pair], names: tuple[str, str]) -> Explanation:
    """Return why A takes another time per step than B, with paired intervals over blocks.

    In each block, with U the time of a step in the untraced window, P that of untraced steps next to the
    traced ones, and T that of traced steps, which the classes partition:

        U_A - U_B = sum of (class_A - class_B)  +  [(P - T)_A - (P - T)_B]  +  [(U - P)_A - (U - P)_B],

    the classes, what tracing itself adds, and the rest. Each is averaged over blocks with Student's t; the
    classes at the level of Holm's method, so that at most one pair of equal cells in twenty shows any.

    Args:
        pairs: traced runs of A and B by block.
        names: of A and B.

    Raises:
        VitsweepError: there is no pair.
    """
    if not pairs:
        raise VitsweepError(f"No block has traced steps of both {names[0]} and {names[1]}.")
    causes = cause_amounts(pairs)
    rows = [{"cause": cause, **_facts(found)} for cause, found in causes.items()]
    least_ms = LEAST_SHARE * float(np.mean([b.step_ms for _, b in pairs]))
    table = pd.concat([_claimed(DataFrame(rows[:-2]), len(pairs), least_ms), DataFrame(rows[-2:])])
    logs = np.log([a.images_per_second / b.images_per_second for a, b in pairs])
    return Explanation(
        names=names,
        difference=mean_interval(np.array([a.step_ms - b.step_ms for a, b in pairs])),
        speedup=float(np.exp(logs.mean())),
        step_ms=tuple(np.mean([[r.step_ms for r in pair] for pair in pairs], axis=0).tolist()),
        num_blocks=len(pairs),
        causes=table.assign(launches=table["a_calls"] - table["b_calls"]).reset_index(drop=True),
        blocks=DataFrame({c: found[:, 0, 0] - found[:, 1, 0] for c, found in causes.items()}),
        operators=_operators(pairs),
    )


def cause_amounts(pairs: Sequence[Sequence[TracedRun]]) -> dict[str, Floats]:
    """Return cause -> `AMOUNTS` by block and cell; the milliseconds of a run add up to its `step_ms`."""
    classes = _amounts(pairs, lambda operator: operator[0])
    found = {str(kind): classes[kind] for kind in TimeClass if classes[kind][..., 0].any()}
    found[TRACING] = np.array([[(-run.added_by_tracing, 0) for run in pair] for pair in pairs])
    found[REST] = np.array([[(r.step_ms - r.plain_ms, 0) for r in pair] for pair in pairs])
    return found


def _amounts(
    pairs: Sequence[Sequence[TracedRun]], key: Callable[[Operator], Any]
) -> defaultdict[Any, Floats]:
    """Return key -> `AMOUNTS` of the operators that have it; axes: block, cell, amount."""
    shape = (len(pairs), len(pairs[0]), len(AMOUNTS))
    found: defaultdict[Any, Floats] = defaultdict(lambda: np.zeros(shape))
    for block, pair in enumerate(pairs):
        for side, run in enumerate(pair):
            for operator, amounts in run.operators.items():
                found[key(operator)][block, side] += amounts
    return found


def _facts(found: Floats) -> dict[str, Any]:
    """Return the difference of milliseconds with its interval, and the mean amounts of A and of B."""
    row = _ends(mean_interval(found[:, 0, 0] - found[:, 1, 0]))
    for side, means in zip("ab", found.mean(axis=0).tolist(), strict=True):
        row |= {f"{side}_{name}": mean for name, mean in zip(AMOUNTS, means, strict=True)}
    return row


def _claimed(table: DataFrame, num_blocks: int, least_ms: float = 0.0) -> DataFrame:
    """Return `low, high, shown` of the rows after Holm's method over those above `least_ms` in A or B.

    The interval is that of the claim. The other rows, and all below `LEAST_BLOCKS` blocks, have none.
    """
    is_tested = (table[["a_ms", "b_ms"]].max(axis=1) > least_ms) & (num_blocks >= LEAST_BLOCKS)
    degrees, ms = num_blocks - 1.0, table["ms"]
    error = (table["high"] - ms) / half_width(1.0, degrees)
    p_values = np.where(is_tested, two_sided(ms, error, degrees), nan)
    p_holm, levels = adjusted(p_values)
    half = half_width(error, degrees, levels)
    return table.assign(low=ms - half, high=ms + half, shown=p_holm < LEVEL)


def _ends(interval: tuple[float, float, float]) -> dict[str, Any]:
    """Return a difference with its interval, and whether it is shown to be one."""
    ms, low, high = interval
    return {"ms": ms, "low": low, "high": high, "shown": bool(low > 0 or high < 0)}


def _operators(pairs: Sequence[Pair]) -> DataFrame:
    """Return the operators of both cells, the largest difference first."""
    every = _amounts(pairs, lambda operator: operator)
    spent = {operator: found[..., 0].mean() for operator, found in every.items()}
    least = SMALL_SHARE * sum(spent.values())
    shown = _amounts(pairs, lambda o: o if spent[o] >= least else (o[0], POOLED, ""))
    rows = [
        dict(zip(("class", "operator", "shapes"), operator, strict=True)) | _facts(found)
        for operator, found in shown.items()
    ]
    table = _claimed(DataFrame(rows), len(pairs))
    return table.sort_values("ms", key=abs, ascending=False, ignore_index=True)


def current_records(tables: SweepTables) -> list[RunRecord]:
    """Return the runs of each cell's newest code."""
    newest = set(tables.runs["run_id"]) if len(tables.runs) else set()
    return [record for record in tables.records if record.run_id in newest]


def explain_cells(
    tables: SweepTables, variant: str, baseline: str, names: tuple[str, str]
) -> Explanation:
    """Return why one cell of a sweep is faster than another, from its stored traces.

    Raises:
        VitsweepError: no block has traced steps of both.
    """
    pairs = traced_pairs(current_records(tables), variant, baseline)
    found = explained(pairs, names)
    late = [_late_rank([pair[side] for pair in pairs], names[side]) for side in (0, 1)]
    return replace(found, notes=tuple(filter(None, [_disturbed(found), *late])))


def _disturbed(found: Explanation) -> str:
    """Say that tracing, or what no cause explains, is most of the difference; "" where it is not."""
    apart = found.causes[found.causes["cause"].isin([TRACING, REST])]
    cause, ms = max(zip(apart["cause"], apart["ms"], strict=True), key=lambda row: abs(row[1]))
    whole = found.total["ms"]
    if abs(ms) <= max(abs(whole) / 2, LATE * max(found.step_ms)):
        return ""
    return say("disturbed", cause=cause, ms=number(ms), difference=number(whole))


def _late_rank(runs: Sequence[TracedRun], name: str) -> str:
    """Say which rank the others wait for, and how long; "" where that is short."""
    waited = float(np.mean([run.waited_ms for run in runs]))
    if waited < LATE * float(np.mean([run.step_ms for run in runs])):
        return ""
    ranks = Counter(run.critical_rank for run in runs)
    listed = ", ".join(f"rank {rank} in {count(n, 'block')}" for rank, n in ranks.most_common())
    which = listed if len(ranks) > 1 else f"rank {runs[0].critical_rank}"
    return say("late_rank", name=name, ms=number(waited), which=which)


def explanations(tables: SweepTables) -> list[Explanation]:
    """Return why each traced cell of a sweep is faster or slower than its baseline."""
    traced = {r.cell_id for r in tables.records if "trace" in r.samples}
    names = names_by_id(tables.cells)
    found = []
    for cell_id, baseline in tables.baselines.items():
        if baseline not in (None, cell_id) and {cell_id, baseline} <= traced & names.keys():
            with suppress(VitsweepError):
                pair = names[cell_id], names[str(baseline)]
                found.append(explain_cells(tables, cell_id, str(baseline), pair))
    return found


def section(tables: SweepTables) -> Markup:
    """Return what a report says of each traced cell; "" of none."""
    said = [
        Markup("<p>{}</p>\n").format(" ".join((e.sentence, *e.notes))) for e in explanations(tables)
    ]
    link = '<p><a href="#causes">Cause by cause</a></p>'
    return Markup("").join([*said, Markup(link)] if said else [])


def cause_text(found: Explanation) -> DataFrame:
    """Return the table that the terminal shows, the measured difference last."""
    table = pd.concat([found.causes, DataFrame([found.total])])
    columns: dict[str, Column] = {
        "cause": values("cause"),
        "ms a step": DIFFERENCE,
        "A": values("a_ms", number),
        "B": values("b_ms", number),
        "launches": values("launches", lambda n: f"{n:+,.0f}" if round(n) else ""),
        "differs": _differs,
    }
    return text_columns(table, columns)


def operator_text(found: Explanation, rows: int) -> DataFrame:
    """Return the table of the operators that differ most."""
    columns: dict[str, Column] = {
        "operator": _operator_names,
        "class": values("class"),
        "shapes": values("shapes"),
        "ms a step": DIFFERENCE,
        "calls": lambda table: [
            f"{a:,.0f} | {b:,.0f}" for a, b in zip(table["a_calls"], table["b_calls"], strict=True)
        ],
        "differs": _differs,
    }
    return text_columns(found.operators.head(rows), columns)


def _operator_names(table: DataFrame) -> list[str]:
    """Return the operators without namespace; a row that is none of its own with its class."""
    names = zip(table["operator"], table["class"], strict=True)
    return [
        f"{name} {kind}" if name in (POOLED, BETWEEN) else re.split(r"::|: ", name)[-1]
        for name, kind in names
    ]


def _differs(table: DataFrame) -> list[str]:
    return ["" if shown else "not shown" for shown in table["shown"]]
