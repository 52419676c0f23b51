"""Why one cell is faster than another: causes that add up to the measured difference (`vitsweep explain`)."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.results.record import RunRecord, Status
from vitsweep.spec.measurement import BETWEEN, POOLED, TimeClass
from vitsweep.tables.formatting import (
    Column,
    count,
    missing,
    number,
    text_columns,
    text_rows,
    times,
    values,
    with_interval,
)
from vitsweep.tables.names import CHOICES, cell_names, names_by_id, varying_columns
from vitsweep.tables.speedup import moved_elsewhere
from vitsweep.tables.stats import mean_interval
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_runs, keyed

Floats = NDArray[np.float64]
Operator = tuple[str, str, str]

TRACING, REST = "tracing itself", "rest"
TRACED_STEP = "traced step"
MODULES = "Modules, forward and backward, in traced steps"
"""Title of the table of the model's parts."""
MOST_NAMED = 3
"""Causes that the sentence names."""
WORTH_A_WORD = 0.05
"""Of the largest cause: a smaller one is not named."""
FEWER_CALLS = 0.05
"""A change of the number of launches below this share is not worth a word."""
SMALL_SHARE = 0.002
"""Operators below this share of a step are shown as one row of their class."""
LARGE_REST = 0.05
"""A rest above this share of a step is said."""
LATE = 0.02
"""Waiting for one rank above this share of a step is said."""
UNITS = {TimeClass.products: "GFLOP/s", TimeClass.attention: "GFLOP/s",
         TimeClass.elementwise: "GB/s", TimeClass.copies: "GB/s"}  # fmt: skip
"""Class -> unit of the rate that its counted work makes: FLOPs, or bytes read."""
NO_LAUNCH = {TimeClass.communication, TimeClass.ranks, TimeClass.data, TimeClass.host}


@dataclass(frozen=True)
class TracedRun:
    """A run with traced steps, on its critical rank; all per step.

    Attributes:
        step_ms: over the untraced window.
        plain_ms: of steps without the profiler just before the traced ones.
        ms: by class; together the duration of a traced step.
        calls: operators or kernels by class.
        work: FLOPs of products and attention, bytes read by other classes.
        operators: milliseconds, calls and work by (class, operator, shapes of its inputs).
        images_per_second: over the untraced window.
        critical_rank: the rank that the others wait for.
        waited_ms: what each of the others waits for it, on average; 0 where there are none.
        modules: milliseconds by module, of further traced steps; together the duration of one.
    """

    step_ms: float
    plain_ms: float
    ms: Mapping[str, float]
    calls: Mapping[str, float]
    work: Mapping[str, float]
    operators: Mapping[Operator, Floats]
    images_per_second: float
    critical_rank: int
    waited_ms: float
    modules: Mapping[str, float]


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
        sums: dict[str, dict[str, float]] = {c: defaultdict(float) for c in ("ms", "calls", "work")}
        operators: dict[Operator, Floats] = defaultdict(lambda: np.zeros(3))
        for row in rows:
            amounts = [nan if row[c] is None else float(row[c]) / steps for c in sums]
            for by_class, amount in zip(sums.values(), amounts, strict=True):
                by_class[str(row["class"])] += amount
            key = str(row["class"]), str(row["operator"]), str(row["shapes"])
            operators[key] += amounts
        others = max(len({row["rank"] for row in every}) - 1, 1)
        waited = sum(row["ms"] for row in every if row["class"] == TimeClass.ranks)
        waited -= sum(row["ms"] for row in rows if row["class"] == TimeClass.ranks)
        return TracedRun(
            step_ms=step_ms,
            plain_ms=float(trace["plain_ms"]),
            **sums,
            operators=operators,
            images_per_second=float(record.metrics.get("images_per_second") or nan),
            critical_rank=critical,
            waited_ms=waited / steps / others,
            modules=_by_module(trace.get("modules", [])),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _by_module(rows: Sequence[tuple[int, str, float]]) -> dict[str, float]:
    """Return the mean milliseconds of each module over the steps, in the order of the forward pass."""
    steps = len({step for step, _, _ in rows})
    found: dict[str, float] = defaultdict(float)
    for _, module, ms in rows:
        found[str(module)] += float(ms) / steps
    return found


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
        speedup: throughput of A over that of B in the same blocks, with its interval.
        step_ms: of A and of B, over the untraced windows.
        num_blocks: blocks that traced both.
        causes: one row per cause, `tracing itself` and `rest` last: `cause, ms, low, high, shown`, the
            milliseconds of A and B, `less_work_ms` and `better_rate_ms` where work is counted, and the
            change of the number of `launches`. `ms` adds up to the difference.
        blocks: the milliseconds of each cause, one row per block.
        operators: one row per operator and shapes of its inputs, the largest difference first: `class,
            operator, shapes, ms, low, high, shown`, and for A and B milliseconds, calls, work (FLOPs or
            bytes read) and `rate` in `unit`, all per step on the critical rank.
        modules: one row per part of the model and of the step, in order: `module, ms, low, high, shown`,
            and the milliseconds of A and B in traced steps; the last row is their sum. Empty where a run
            traced no modules.
        notes: what else is known, in sentences.
    """

    names: tuple[str, str]
    difference: tuple[float, float, float]
    speedup: tuple[float, float, float]
    step_ms: tuple[float, float]
    num_blocks: int
    causes: DataFrame
    blocks: DataFrame
    operators: DataFrame
    modules: DataFrame
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> dict[str, Any]:
        """The measured difference as a row like those of `causes`."""
        steps = {"a_ms": self.step_ms[0], "b_ms": self.step_ms[1]}
        return {"cause": "measured difference", **_ends(self.difference), **steps, "launches": 0.0}

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        (a, b), (ms, low, high) = self.names, self.difference
        if missing(low):
            few = f"over {count(self.num_blocks, 'block')}, too few for an interval"
            return f"{a}: {signed(ms)} ms a step against {b}, {few}."
        if low <= 0 <= high:
            head = f"No difference shown between {a} and {b}: {signed(ms)} ms [{signed(low)}, {signed(high)}]"
        else:
            size = sorted((abs(low), abs(high)))
            word = "faster" if ms < 0 else "slower"
            head = (
                f"{a} is {number(abs(ms))} ms [{number(size[0])}, {number(size[1])}] a step {word} than "
                f"{b} ({times(self.speedup[0])} its throughput)"
            )
        causes = self.causes[~self.causes["cause"].isin([TRACING, REST])]
        large = causes["ms"].abs() >= WORTH_A_WORD * causes["ms"].abs().max()
        shown = causes[causes["shown"] & large].sort_values("ms", key=abs, ascending=False)
        parts = [_said(row) for row in shown.head(MOST_NAMED).to_dict("records")]
        others = causes[~causes["shown"]]["cause"].tolist()
        if not parts:
            return f"{head}; no cause is shown to differ."
        named = ", ".join(others) if len(others) <= MOST_NAMED else f"{len(others)} other causes"
        rest = f"; {named} not shown to differ" if others else ""
        link = ", but" if low <= 0 <= high else ":"
        return f"{head}{link} {', '.join(parts)}{self._launches(causes)}{rest}."

    def _launches(self, causes: DataFrame) -> str:
        known = causes[~causes["cause"].isin(NO_LAUNCH)]
        change = known["launches"].sum()
        if abs(change) < max(FEWER_CALLS * known["b_launches"].sum(), 1):
            return ""
        return f"; {abs(change):,.0f} launches {'fewer' if change < 0 else 'more'} in all"

    def texts(self, operators: int = 0, modules: bool = False) -> dict[str, DataFrame]:
        """Return title -> table as the terminal shows it.

        Args:
            operators: rows of the table of operators; 0 for none.
            modules: add that of the model's parts, where they were traced.
        """
        found = {"Causes": cause_text(self)}
        if operators > 0:
            found["Operators that differ most, A | B"] = operator_text(self, operators)
        if modules and len(self.modules):
            found[MODULES] = module_text(self)
        return found

    def json(self) -> dict[str, Any]:
        """Return it as plain values for `--json`."""
        ms, low, high = self.difference
        columns = ["cause", "ms", "low", "high", "less_work_ms", "better_rate_ms", "launches"]
        ends = [None if missing(v) else v for v in (low, high)]
        return {
            "a": self.names[0],
            "b": self.names[1],
            "difference_ms": ms,
            "difference_low_ms": ends[0],
            "difference_high_ms": ends[1],
            "speedup": self.speedup[0],
            "blocks": self.num_blocks,
            "causes": plain_rows(self.causes[columns]),
            "operators": plain_rows(self.operators),
            "modules": plain_rows(self.modules),
            "notes": list(self.notes),
        }


def plain_rows(table: DataFrame) -> list[dict[Any, Any]]:
    """Return the rows of a table as plain values for JSON."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def signed(value: float) -> str:
    """Return milliseconds with their sign, `+1.23` or `-18.4`."""
    places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return "0" if abs(value) < 0.005 else f"{value:+,.{places}f}"


def _said(row: Mapping[Any, Any]) -> str:
    return f"{number(abs(row['ms']))} ms {'less' if row['ms'] < 0 else 'more'} in {row['cause']}"


def explained(pairs: Sequence[Pair], names: tuple[str, str]) -> Explanation:
    """Return why A takes another time per step than B, with paired intervals over blocks.

    In each block, with U the time of a step in the untraced window, P that of plain steps beside the
    traced ones, and T that of traced steps, which the classes partition:

        U_A - U_B = sum of (class_A - class_B)  +  [(P - T)_A - (P - T)_B]  +  [(U - P)_A - (U - P)_B],

    the classes, what tracing itself adds, and the rest. Each is averaged over blocks with Student's t. A
    class of time t with work w splits into less work, mean(t / w) times the change of w, and a better rate,
    mean(w) times the change of t / w; their sum is the change of t.

    Args:
        pairs: traced runs of A and B by block.
        names: of A and B.

    Raises:
        VitsweepError: there is no pair.
    """
    if not pairs:
        raise VitsweepError(f"No block has traced steps of both {names[0]} and {names[1]}.")
    kinds = [str(k) for k in TimeClass if any(r.ms.get(k) for pair in pairs for r in pair)]
    changes = {
        kind: _array(a.ms.get(kind, 0.0) - b.ms.get(kind, 0.0) for a, b in pairs) for kind in kinds
    }
    changes[TRACING] = _array(added_by_tracing(b) - added_by_tracing(a) for a, b in pairs)
    changes[REST] = _array((a.step_ms - a.plain_ms) - (b.step_ms - b.plain_ms) for a, b in pairs)
    rows = [_row(cause, values, pairs) for cause, values in changes.items()]
    logs = _array(np.log(a.images_per_second / b.images_per_second) for a, b in pairs)
    return Explanation(
        names=names,
        difference=mean_interval(_array(a.step_ms - b.step_ms for a, b in pairs)),
        speedup=tuple(float(np.exp(v)) for v in mean_interval(logs)),  # type: ignore[arg-type]
        step_ms=tuple(np.mean([[r.step_ms for r in pair] for pair in pairs], axis=0).tolist()),
        num_blocks=len(pairs),
        causes=DataFrame(rows),
        blocks=DataFrame(changes),
        operators=_operators(pairs),
        modules=_modules(pairs),
    )


def _modules(pairs: Sequence[Pair]) -> DataFrame:
    """Return the parts of the model with what they take in A and in B, and their sum."""
    if not all(run.modules for pair in pairs for run in pair):
        return DataFrame()
    known = dict.fromkeys(module for pair in pairs for run in pair for module in run.modules)
    ordered = sorted(known, key=lambda module: module.startswith("("))  # phases last
    # axes: block, cell (A, B), module
    found = np.array([[[r.modules.get(m, 0.0) for m in ordered] for r in pair] for pair in pairs])
    found = np.concatenate([found, found.sum(axis=2, keepdims=True)], axis=2)
    rows = []
    for place, module in enumerate([*ordered, TRACED_STEP]):
        ends = _ends(mean_interval(found[:, 0, place] - found[:, 1, place]))
        spent = dict(zip(("a_ms", "b_ms"), found[:, :, place].mean(axis=0).tolist(), strict=True))
        rows.append({"module": module, **ends, **spent})
    return DataFrame(rows)


def _operators(pairs: Sequence[Pair]) -> DataFrame:
    """Return the operators of both cells, the largest difference first."""
    nothing, rows = np.zeros(3), []
    keys = dict.fromkeys(key for pair in pairs for run in pair for key in run.operators)
    # axes: block, cell (A, B), amount (milliseconds, calls, work)
    amounts = {
        key: np.array([[run.operators.get(key, nothing) for run in pair] for pair in pairs])
        for key in keys
    }
    least = SMALL_SHARE * sum(found[..., 0].mean() for found in amounts.values())
    shown: dict[Any, Any] = defaultdict(lambda: np.zeros((len(pairs), 2, 3)))
    for key, found in amounts.items():
        is_small = found[..., 0].mean() < least
        shown[(key[0], POOLED, "") if is_small else key] += found
    for key, found in shown.items():
        row: dict[str, Any] = dict(zip(("class", "operator", "shapes"), key, strict=True))
        row |= _ends(mean_interval(found[:, 0, 0] - found[:, 1, 0]))
        unit = UNITS.get(key[0], "")
        for side, (spent, calls, work) in zip("ab", found.mean(axis=0), strict=True):
            rate = 1e-6 * work / spent if unit and spent > 0 and work > 0 else nan
            row |= {
                f"{side}_ms": spent,
                f"{side}_calls": calls,
                f"{side}_work": work or nan,
                f"{side}_rate": rate,
            }
        rows.append(row | {"unit": unit})
    return DataFrame(rows).sort_values("ms", key=abs, ascending=False, ignore_index=True)


def _ends(interval: tuple[float, float, float]) -> dict[str, Any]:
    """Return a difference with its interval, and whether it is shown to be one."""
    ms, low, high = interval
    return {"ms": ms, "low": low, "high": high, "shown": bool(low > 0 or high < 0)}


def added_by_tracing(run: TracedRun) -> float:
    """Return what tracing adds to a step."""
    return sum(run.ms.values()) - run.plain_ms


def _array(values: Iterable[float]) -> Floats:
    return np.array([*values], float)


def _row(cause: str, changes: Floats, pairs: Sequence[Pair]) -> dict[str, Any]:
    def mean(side: int, part: str) -> float:
        return float(np.mean([getattr(pair[side], part).get(cause, 0.0) for pair in pairs]))

    a_launches, b_launches = mean(0, "calls"), mean(1, "calls")
    less_work, better_rate = _split(cause, pairs)
    return {
        "cause": cause,
        **_ends(mean_interval(changes)),
        "a_ms": nan if cause in (TRACING, REST) else mean(0, "ms"),
        "b_ms": nan if cause in (TRACING, REST) else mean(1, "ms"),
        "less_work_ms": less_work,
        "better_rate_ms": better_rate,
        "launches": a_launches - b_launches,
        "a_launches": a_launches,
        "b_launches": b_launches,
    }


def _split(cause: str, pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return milliseconds by a change of work and by a change of its rate; NaN where work is not counted."""
    t, w = (
        np.array([[run.__dict__[part].get(cause, 0.0) for run in pair] for pair in pairs])
        for part in ("ms", "work")
    )
    if cause not in UNITS or not (w > 0).all():
        return nan, nan
    per_work = t / w
    by_work = (w[:, 0] - w[:, 1]) * per_work.mean(axis=1)
    by_rate = w.mean(axis=1) * (per_work[:, 0] - per_work[:, 1])
    return float(by_work.mean()), float(by_rate.mean())


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
    return replace(found, notes=(*filter(None, late), *_notes(tables, variant, baseline, found)))


def _late_rank(runs: Sequence[TracedRun], name: str) -> str:
    """Say which rank the others wait for, and how long; "" where that is short."""
    waited = float(np.mean([run.waited_ms for run in runs]))
    if waited < LATE * float(np.mean([run.step_ms for run in runs])):
        return ""
    ranks = Counter(run.critical_rank for run in runs)
    listed = ", ".join(f"rank {rank} in {count(n, 'block')}" for rank, n in ranks.most_common())
    which = listed if len(ranks) > 1 else f"rank {runs[0].critical_rank}"
    return f"{name}: the other ranks wait {number(waited)} ms a step for {which}."


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


def _notes(tables: SweepTables, variant: str, baseline: str, found: Explanation) -> Iterator[str]:
    """Yield what a reader must know beside the causes."""
    measured = keyed(checked_runs(tables.runs), {variant: baseline})
    moved = moved_elsewhere(measured)
    yield from (f"{sentence[:1].upper()}{sentence[1:]}." for sentence in moved.values())
    yield from rest_note(found.causes, max(found.step_ms))


def rest_note(causes: DataFrame, step_ms: float) -> Iterator[str]:
    """Yield what a large rest means."""
    rest = causes.loc[causes["cause"] == REST, "ms"].abs().max()
    if rest > LARGE_REST * step_ms:
        yield (
            f"The rest is more than {100 * LARGE_REST:.0f} % of a step: the timed window and the steps "
            "beside the traced ones differ, as where steps are uneven or the machine was busy."
        )


def find_cell(cells: DataFrame, text: str) -> str:
    """Return the id of the cell that a text names: an id, a name as in tables, or settings.

    Of several cells that have the settings, the one counts that changes least beside them.

    Args:
        cells: one row per cell.
        text: such as `3f2a9c`, `O2 · fsdp`, `precision=O2`, `O2 fsdp`; the empty text for a baseline.

    Raises:
        BadValueError: it names no cell, or several.
    """
    labels = cell_names(cells)
    ids = cells["cell_id"].astype(str)
    for hits in (ids == text, labels == text):
        if hits.any():
            return str(ids[hits].iloc[0])
    columns = varying_columns(cells) or ["model"]
    words = [word for word in text.replace("·", " ").replace("+", " ").split() if word]
    records = text_rows(cells[[c for c in cells if c in columns or c in CHOICES]])
    keep = Series(
        [all(_has(row, word) for word in words) for row in records], cells.index, dtype=bool
    )
    found = cells[keep]
    known = dict(zip(ids, records, strict=True))
    changes = {
        str(cell): sum(known[str(cell)].get(c) != known.get(str(base), {}).get(c) for c in columns)
        for cell, base in zip(found["cell_id"], found["baseline_cell_id"], strict=True)
    }
    least = [cell for cell, number in changes.items() if number == min(changes.values())]
    if len(least) == 1:
        return least[0]
    listed = ", ".join(f"`{name}`" for name in (labels[keep] if len(found) else labels).head(12))
    fault = "names several cells" if len(found) else "names no cell"
    raise BadValueError(f"`{text}` {fault} of the sweep: type one of {listed}, or a cell id.")


def _has(row: Mapping[str, str], word: str) -> bool:
    """Return whether a row has a setting, `precision=O2`, or a choice, `O2`."""
    key, is_setting, value = word.partition("=")
    return row.get(key) == value if is_setting else word in row.values()


def cause_text(found: Explanation) -> DataFrame:
    """Return the table that terminal and report show, the measured difference last."""
    columns: dict[str, Column] = {
        "cause": values("cause"),
        "ms a step": with_interval("ms", signed, signed, "{}"),
        found.names[0]: values("a_ms", number),
        found.names[1]: values("b_ms", number),
        "by less work": values("less_work_ms", _signed_or_empty),
        "by a better rate": values("better_rate_ms", _signed_or_empty),
        "launches": values("launches", lambda n: f"{n:+,.0f}" if round(n) else ""),
        "differs": _differs,
    }
    return text_columns(pd.concat([found.causes, DataFrame([found.total])]), columns)


def operator_text(found: Explanation, rows: int) -> DataFrame:
    """Return the table of the operators that differ most."""
    columns: dict[str, Column] = {
        "operator": _operator_names,
        "class": values("class"),
        "shapes": values("shapes"),
        "ms a step": with_interval("ms", signed, signed, "{}"),
        "calls": lambda t: _both(t, "calls", lambda n: f"{n:,.0f}"),
        "rate": lambda t: [
            f"{pair} {unit}" if pair else ""
            for pair, unit in zip(_both(t, "rate", number), t["unit"], strict=True)
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


def module_text(found: Explanation) -> DataFrame:
    """Return the table of the parts of the model, their sum last."""
    columns: dict[str, Column] = {
        "module": values("module"),
        "ms a step": with_interval("ms", signed, signed, "{}"),
        found.names[0]: values("a_ms", number),
        found.names[1]: values("b_ms", number),
        "differs": _differs,
    }
    return text_columns(found.modules, columns)


def _differs(table: DataFrame) -> list[str]:
    return ["" if shown else "not shown" for shown in table["shown"]]


def _both(table: DataFrame, amount: str, shown: Callable[[float], str]) -> list[str]:
    """Return the amounts of A and B as `4 | 2`; "" where neither is known."""
    pairs = zip(table[f"a_{amount}"], table[f"b_{amount}"], strict=True)
    return [
        ""
        if missing(a) and missing(b)
        else " | ".join("-" if missing(v) else shown(v) for v in (a, b))
        for a, b in pairs
    ]


def _signed_or_empty(value: float) -> str:
    return "" if missing(value) else signed(value)
