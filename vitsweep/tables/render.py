"""The table of cells as text, for Markdown, HTML and a console of any width; rows and columns by name."""

import re
import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pandas import DataFrame, Series
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from vitsweep.errors import BadValueError
from vitsweep.results.metrics import FLAGS, METRICS, heading, headings, own_metrics
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.menu import choices, class_of, plain_choice
from vitsweep.spec.model_spec import MEAN_OVER_PARTS
from vitsweep.tables.formatting import (
    BASELINE,
    Column,
    count,
    cut_at_word,
    interval,
    missing,
    number,
    percent,
    plain,
    ratios,
    status,
    status_words,
    tally,
    text_columns,
    value_label,
    values,
    whole,
    with_interval,
    with_spread,
)
from vitsweep.tables.names import (
    baseline_settings,
    cell_names,
    name_parts,
    varying_columns,
)
from vitsweep.tables.notes import known_starts, lines_of, two_starts
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import OTHER_SIZE, further
from vitsweep.tables.stats import Claim
from vitsweep.tables.valid_runs import checked_cells
from vitsweep.words import did_you_mean

BEST = 20
"""Rows that are shown unless all are asked for."""

GAP = 2
"""Characters between two columns."""

LEAST_ROOM = 20
"""Characters in which a name is folded with its further lines indented."""

LONGEST_REASON = 300
"""Characters of a footnote; `cells.csv` has the whole reason."""

COMMON = ("model", "objective", "data", "world_size", "images_per_step")
"""Besides techniques that are not the default ones: what the title says where it is the same everywhere."""

COLOURS: Mapping[str, str] = {
    Claim.faster: "green",
    Claim.slower: "red",
    Claim.baseline: "bold",
    Claim.no_difference_shown: "dim",
    Claim.equal: "dim",
}


@dataclass(frozen=True)
class TextTable:
    """A table of text for a terminal, its numbers to the right.

    Numbers are whole where they fit next to each other; text is folded first.

    Attributes:
        text: all of it.
        title: above the table.
        show_header: write the headings.
    """

    text: DataFrame
    title: str | None = None
    show_header: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table."""
        if self.title:
            yield Text(self.title, style="italic")
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
                      padding=(0, GAP - 1, 0, 0), header_style="bold",
                      show_header=self.show_header)  # fmt: skip
        numeric = headings(self.text)
        for name in self.text:
            head = str(name)
            if _longest(self.text[name]) < len(head):
                head = head.replace(" ", "\n")
            if name in numeric:
                table.add_column(head, justify="right", no_wrap=True)
            else:
                table.add_column(head, overflow="fold")
        first, *others = _needed(self.text)
        room = options.max_width - sum(_needed(self.text)[name] for name in others)
        text = self.text.astype(str)
        if room >= LEAST_ROOM:
            text[first] = [textwrap.fill(v, room, subsequent_indent="  ") for v in text[first]]
        for row in text.to_dict("records"):
            is_heading = not any([*row.values()][1:])  # of a group of rows
            style = COLOURS.get(str(row.get("result", "")).split(" [")[0], "bold" * is_heading)
            table.add_row(*(Text(value, style=style) for value in row.values()))
        yield table


def _needed(text: DataFrame) -> dict[Hashable, int]:
    """Return the characters of each column where nothing is folded, with the gap."""
    return {c: max(_longest(text[c]), *map(len, str(c).split())) + GAP for c in text}


def _longest(column: Series) -> int:
    """Return the characters of the longest value."""
    return max((len(str(value)) for value in column), default=0)


# What was measured of a cell, as text.


def _blocks(table: DataFrame) -> Series:
    """Return the blocks that count: those that a row shares with its baseline, else those measured."""
    shared = table.get("num_pairs", Series(0, table.index))
    return table["blocks"].where(~shared.gt(0).fillna(False), shared)


def _replicates(table: DataFrame) -> list[str]:
    """Return how many repetitions of a setting were measured, `2 of 3`."""
    if "replicates" not in table:
        return [""] * len(table)
    counts = zip(table["replicates"], table["replicates_asked"], strict=True)
    return [f"{n}" if n == asked else f"{n} of {asked}" for n, asked in counts]


def _families(table: DataFrame) -> list[str]:
    """Return the interval that belongs to the claim, where it is one of several cells."""
    columns = (table[c] for c in ("speedup", "claim_low", "claim_high", "family_size"))
    return [
        f"{ends} of {size:.0f}"
        if (ends := interval(*row)) and not missing(size) and size > 1
        else ""
        for *row, size in zip(*columns, strict=True)
    ]


def _rates_of_work(table: DataFrame) -> list[str]:
    """Return TFLOP/s of all rows where images of some are of another size than their baseline's."""
    if not table["speedup_note"].astype(str).str.contains(OTHER_SIZE).any():
        return [""] * len(table)
    return values("model_tflops_per_rank", number)(table)


def _statuses(table: DataFrame) -> list[str]:
    known = [c for c in ("status", "reason", *FLAGS) if c in table]
    return [status(row) for row in table[known].to_dict("records")]


def _times_to_target(table: DataFrame) -> list[str]:
    """Return seconds to the target accuracy, or `not reached`; and of how many repetitions that is."""
    targets = table.get("task.target_accuracy", Series(dtype=float))
    if "seconds_to_target" not in table or targets.isna().all():
        return [""] * len(table)
    return [_time_to_target(row) for row in table.to_dict("records")]


def _time_to_target(row: Mapping[Any, Any]) -> str:
    if missing(row["task.target_accuracy"]) or row["status"] != Status.measured:
        return ""
    known = [row.get(c) for c in ("reached_target", "missed_target")]
    reached, missed = (0.0 if missing(n) else float(n) for n in known)  # type: ignore[arg-type]
    some, tried = reached and missed, reached + missed
    if missing(row["seconds_to_target"]):
        return f"not reached by {missed:.0f} of {tried:.0f}" if some else "not reached"
    seconds = number(row["seconds_to_target"])
    return f"median {seconds} ({reached:.0f} of {tried:.0f})" if some else seconds


def _points(value: Any) -> str:
    return f"{100 * value:+.2f}"


FAMILY = "among all"
"""Heading of the interval that belongs to the claim among all cells of its family."""

DIFFERENCE, ACCURACY = "top-1 - baseline's", "accuracy"
"""Headings of the difference from the baseline's accuracy, and of the claim about it."""

MEASURED: dict[str, Column] = {
    heading("images_per_second"): with_spread("images_per_second", number),
    heading("speedup"): ratios("speedup"),
    "result": values("claim"),
    "note": values("speedup_note"),
    "status": _statuses,
    FAMILY: _families,
    heading("model_tflops_per_rank"): _rates_of_work,
    heading("step_time_ms"): values("step_time_ms", number),
    heading("peak_gib"): values("peak_gib", number),
    heading("accuracy_top1"): with_spread("accuracy_top1", percent),
    DIFFERENCE: with_interval("accuracy_difference", _points, _points),
    ACCURACY: values("accuracy_claim"),
    heading("seconds_to_target"): _times_to_target,
    heading("blocks"): lambda table: [whole(number) for number in _blocks(table)],
    heading("replicates"): _replicates,
}

TEXTS = {
    "result": "claim", "note": "speedup_note", ACCURACY: "accuracy_claim", DIFFERENCE: "accuracy_difference",
}  # fmt: skip
"""Heading -> column, of those that `headings` has not."""

SHOWN = (
    "images_per_second speedup speedup_low speedup_high claim speedup_note step_time_ms "
    "accuracy_top1 blocks reason claim_low claim_high family_size"
).split()
ALWAYS = (heading("images_per_second"), heading("speedup"))
IN_ORDER = (
    heading("model_tflops_per_rank"), heading("seconds_to_target"), heading("accuracy_top1"), ACCURACY,
    DIFFERENCE, heading("peak_gib"), heading("step_time_ms"), heading("blocks"),
)  # fmt: skip
"""Columns that a terminal shows as far as there is room, after those of further metrics."""


def _own(table: DataFrame) -> dict[str, Column]:
    """Return the columns that the table has of further metrics with a heading, and of the user's own."""
    headed = {m.heading: m for m in METRICS.values() if m.heading and m.heading not in MEASURED}
    known = headed | {m.axis_label: m for m in own_metrics(table).values()}
    return {h: values(m.column, number) for h, m in known.items() if m.column in table}


def _device(cells: DataFrame) -> dict[str, Column]:
    """Return the column of the device, where rows ran on several kinds."""
    several = "device" in cells and len({*map(plain, cells["device"])} - {""}) > 1
    return {"device": values("device")} if several else {}


def cell_text(cells: DataFrame, wide: bool = False) -> DataFrame:
    """Return the cells as text: name, img/s, speedup, claim, status, step ms, ...

    The rows are in the order of `ranked`; empty columns are left out. With `wide` the varying columns
    follow at the end. Names and columns are decided on the rows given: to show some cells of a sweep,
    make the text of the whole table first and select rows afterwards.
    """
    cells = checked_cells(cells, *SHOWN)
    ordered = ranked(cells.assign(_name=cell_names(cells)))
    measured = {h: c for h, c in MEASURED.items() if wide or h != FAMILY} | _own(ordered)
    settings = {c: values(c) for c in varying_columns(cells)} if wide else {}
    shown = {"cell": values("_name")} | _device(cells) | measured | settings
    return text_columns(ordered, shown, always=("cell", *ALWAYS, "status"))


def ranked(cells: DataFrame) -> DataFrame:
    """Return the cells with the largest speedup first, then throughput; the unmeasured last.

    A measured cell without a throughput comes after those that have one.
    """
    table = checked_cells(cells)
    keys = [c for c in ("speedup", "images_per_second") if c in table]
    order = table.assign(_last=table["status"] != Status.measured)
    ascending = [True] + [False] * len(keys)
    return order.sort_values(["_last", *keys], ascending=ascending, kind="stable").drop(
        columns="_last"
    )


# The table of cells in a terminal: what is equal in all rows stands in the title.


@dataclass(frozen=True)
class CellTable:
    """A table that fits the console it is printed on, with its footnotes below.

    Columns that are empty are left out, and numbers that are the same in all rows stand in the title.
    There are as many columns as fit the terminal; the others are named. Refused cells stand below the table,
    one line per reason.

    Attributes:
        cells: one row per cell.
        sweep: its name, as a command takes it.
        rows: how many are shown, besides the baselines of those shown.
    """

    cells: DataFrame
    sweep: str
    rows: int = BEST

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield title, table and footnotes for the width of the console."""
        cells = checked_cells(self.cells, *SHOWN)
        refused = cells["status"] == Status.invalid
        ran = ranked(cells[~refused])
        yield Text(" · ".join([f"Sweep {self.sweep}", *common_settings(ran)]), style="italic")
        yield from (Text(line, style="italic") for line in baseline_line(ran))
        if len(ran):
            yield from self._table(ran, options.max_width)
        yield from map(Text, lines_of(cells, refused))

    def _table(self, ran: DataFrame, width: int) -> Iterator[TextTable | Text]:
        shown, first = ran, ran.head(self.rows)
        if len(ran) > self.rows:  # the first rows, and the baselines that they are compared with
            baselines = ran["cell_id"].isin(first.get("baseline_cell_id", Series(dtype=object)))
            shown = ran[baselines | ran.index.isin(first.index)]
        marks, notes = footnotes(shown)
        numbers, once = _said_once(_numbers(shown, marks))
        names = name_parts(ran).loc[numbers.index]
        text, match = names[["change"]].set_axis(["cell"], axis=1).join(numbers), names["match"]
        text.attrs = numbers.attrs
        for device in _device(ran).values():  # rows of one device stand together
            where = zip(device(ran.loc[numbers.index]), match, strict=True)
            match = Series([" · ".join(filter(None, parts)) for parts in where], numbers.index)
        kept = _fitted(text, width)
        yield TextTable(_grouped(text[kept], match) if any(match) else text[kept])
        told = map(": ".join, (once | _unfinished(ran)).items())
        yield Text("\n" + "; ".join([tally_of(ran), *told]) + ".")
        if left_out := [f"`{c}`" for c in text if c not in kept]:
            yield Text(f"Not shown (`collect --columns`): {', '.join(left_out)}.", style="dim")
        yield from (Text(line, style="dim") for line in notes)
        if len(shown) < len(ran):
            rest = tally_of(ran.drop(shown.index), "more ")
            yield Text(f"{rest}: `vitsweep collect {self.sweep} --rows all` shows them.")


def _fitted(text: DataFrame, width: int) -> list[str]:
    """Return the first columns, up to the result, and of the others those that fit `width` characters."""
    needed = _needed(text)
    kept = [*text][: [*text].index("result") + 1]
    for column in [*text][len(kept) :]:
        fits = sum(needed[c] for c in (*kept, column)) - GAP <= width
        kept += [column] if fits else []
    return kept


def _grouped(text: DataFrame, match: Series) -> DataFrame:
    """Return the rows below a row with the heading of their group; an empty row parts the groups."""
    parts: list[DataFrame] = []
    for name in sorted(set(match), key=by_numbers):
        heads = [*([""] if parts else []), name] if name else []
        parts += [DataFrame({"cell": heads}), text[match == name]]
    grouped = pd.concat(parts)[[*text]].fillna("")
    grouped.attrs = text.attrs
    return grouped


def footnotes(cells: DataFrame) -> tuple[list[str], list[str]]:
    """Number the reasons, notes and validity flags of the rows; a flag of all rows has no number.

    Returns:
        A mark for each row, such as ` [1]`, and the lines below the table.
    """
    shown = checked_cells(cells, *SHOWN)
    measured = shown[shown["status"] == Status.measured]
    # a cell without a run has pd.NA, which is neither true nor false
    all_set = {c: shown[c].eq(True).fillna(False).astype(bool) for c in FLAGS if c in shown}
    set_ = {c: is_set for c, is_set in all_set.items() if is_set.any()}
    everywhere = [c for c, is_set in set_.items() if is_set[measured.index].all()]
    numbers: dict[str, int] = {}
    marks = []
    started = known_starts(shown)
    starts = dict(zip(shown["cell_id"], started, strict=True))
    for place, row in enumerate(shown.to_dict("records")):
        own = [c for c, is_set in set_.items() if c not in everywhere and is_set.iloc[place]]
        texts = [*map(_one_line, (row["reason"], further(row))), _own_interval(row)]
        texts += technique_notes(row)
        is_own = row.get("baseline_cell_id") == row["cell_id"]
        if not missing(row.get("peak_rss_gib")) and not is_own:
            base = starts.get(row.get("baseline_cell_id"))
            texts.append(two_starts(started.iloc[place], base, "the baseline's"))
        proof, _, left_out = plain(row.get("proved")).partition("not proved: ")
        not_proved = [say("not_proved", what=left_out)] if "compared with its" in left_out else []
        if MEAN_OVER_PARTS in proof:
            not_proved.append(say("mean_over_parts", mean=MEAN_OVER_PARTS.capitalize()))
        texts = [*filter(None, [*texts, " ".join(not_proved), _compiled(row)])]
        told = [*texts, *map(_explanation, own)]
        found = sorted(numbers.setdefault(text, len(numbers) + 1) for text in told)
        marks.append("".join(f" [{number}]" for number in found))
    notes = [f"[{number}] {text}" for text, number in numbers.items()]
    notes += [f"Note: {_explanation(flag)}" for flag in everywhere]
    return marks, notes


def _own_interval(row: Mapping[Any, Any]) -> str:
    """Say that the interval of a row excludes 1 although no difference is shown among all cells."""
    low, high, size = (row[c] for c in ("speedup_low", "speedup_high", "family_size"))
    is_unshown = row["claim"] == Claim.no_difference_shown
    if not is_unshown or missing(low) or missing(size) or low <= 1 <= high:
        return ""
    noun = "setting" if "replicated" in row else "cell"
    return say("own_interval", cells=count(size, noun))


def technique_notes(row: Mapping[Any, Any]) -> list[str]:
    """Return what the techniques of a row have to say about it."""
    kinds = (class_of(group, plain(row.get(group))) for group in GROUPS)
    return [note for kind in kinds if kind and (note := kind.note(row))]


def _compiled(row: Mapping[Any, Any]) -> str:
    """Say how long compiling took, cold and with cached kernels."""
    first, later = row.get("first_compile_seconds"), row.get("compile_seconds")
    if missing(first) or not first:
        return ""
    after = "" if first == later else f", later {number(later)} s"
    return say("compiled", first=number(first), later=after)


def _explanation(flag: str) -> str:
    caption = FLAGS[flag].caption
    return f"{caption[:1].upper()}{caption[1:]} (`{flag}`)."


def _one_line(reason: object) -> str:
    line = "" if missing(reason) else " ".join(str(reason).split())
    return cut_at_word(line, LONGEST_REASON)


def _numbers(shown: DataFrame, marks: Sequence[str]) -> DataFrame:
    """Return what was measured as text, without empty columns; `result` is the claim or the status."""
    # the sum of blocks over repetitions says nothing
    blocks = {heading("blocks")} if "replicates" in shown else set()
    order = (h for h in IN_ORDER if h not in blocks)
    results = [f"{word}{mark}" for word, mark in zip(_results(shown), marks, strict=True)]
    columns: dict[str, Column] = {h: MEASURED[h] for h in ALWAYS} | {"result": lambda _: results}
    columns |= {heading("replicates"): MEASURED[heading("replicates")]} | _own(shown)
    return text_columns(shown, columns | {h: MEASURED[h] for h in order}, ALWAYS[:1])


def _results(shown: DataFrame) -> list[str]:
    is_claimed = (shown["status"] == Status.measured) & ~shown["claim"].map(missing)
    return shown["claim"].where(is_claimed, shown["status"].map(status_words)).map(str).tolist()


def _said_once(text: DataFrame) -> tuple[DataFrame, dict[str, str]]:
    """Take out the numbers that are the same in all rows; return what is left, and each by its heading."""
    candidates = (heading("replicates"), *IN_ORDER)
    equal = [c for c in candidates if c in text and len(text) > 1 and text[c].nunique() == 1]
    return text.drop(columns=equal), {c: text[c].iloc[0] for c in equal}


def by_numbers(text: str) -> list[int | str]:
    """Return a key that sorts `2 ranks` before `16 ranks`."""
    return [
        int(part) if part.isdecimal() else part
        for part in re.split(r"(\d+)", text.replace(",", ""))
    ]


def baseline_line(cells: DataFrame) -> list[str]:
    """Return the line that says what `baseline` stands for; none where there is none."""
    settings = baseline_settings(cells)
    return [f"{BASELINE}: {settings}"] if settings else []


def common_settings(ran: DataFrame) -> list[str]:
    """Return the settings that are the same in all rows: the techniques but the default ones, and sizes."""
    same = [c for c in (*COMMON, *GROUPS) if c in ran and ran[c].nunique(dropna=False) == 1]
    told = [c for c in same if c in COMMON or str(ran[c].iloc[0]) != plain_choice(c)]
    labels = {c: value_label(c, value) for c in told if (value := plain(ran[c].iloc[0]))}
    sizes = [*ran["num_parameters"].dropna().unique()] if "num_parameters" in ran else []
    if labels.get("model") and labels["model"] not in choices("model") and len(sizes) == 1:
        size = f"{sizes[0] / 1e6:.3g} M" if sizes[0] >= 1e6 else whole(sizes[0])
        labels["model"] += f" ({size} parameters)"
    return [*labels.values()]


def tally_of(cells: DataFrame, more: str = "") -> str:
    """Return `5 cells, all measured`, or `9 cells: 6 measured, 2 out of memory, 1 screened`."""
    words = cells["status"].map(status_words)
    words = words.mask(cells.get("claim", words) == Claim.screened, str(Claim.screened))
    noun = count(len(cells), f"{more}{'setting' if 'replicates' in cells else 'cell'}")
    if len(set(words)) == 1:
        return f"{noun}, {'all ' if len(cells) > 1 else ''}{words.iloc[0]}"
    return f"{noun}: {tally(sorted(words))}"  # whichever row is first


def _unfinished(ran: DataFrame) -> dict[str, str]:
    """Return `2 to 4 of 5` for `blocks` where a cell lacks blocks that it was to have, as after Ctrl-C."""
    asked = "measurement.blocks"
    if not {asked, "blocks", "claim"} <= {*ran} or "replicates" in ran:
        return {}
    # time or an interval ended it, no number
    if "any_look" in ran and ran["any_look"].eq(True).any():
        return {}
    whole_runs = (ran["status"] == Status.measured) & (ran["claim"] != Claim.screened)
    # whose runs may be repeated for a cell
    compared = whole_runs & (ran["claim"] != Claim.baseline)
    kept = compared if compared.any() else whole_runs
    done, planned = _blocks(ran)[kept].dropna(), ran.loc[kept, asked].dropna()
    if done.empty or planned.nunique() != 1 or done.min() >= planned.iloc[0]:
        return {}
    span = " to ".join(map(whole, sorted({done.min(), min(done.max(), planned.iloc[0])})))
    return {heading("blocks"): f"{span} of {whole(planned.iloc[0])}"}


# Columns by what a user typed: `collect --columns`.


def pick(cells: DataFrame, names: Sequence[str]) -> DataFrame:
    """Return the named columns as text; numbers that are not whole with four significant digits.

    Raises:
        BadValueError: there is no such column.
    """
    known = named_columns(cells, names)
    shown = {n: values(column, _typed) for n, column in zip(names, known, strict=True)}
    return DataFrame({n: column(cells) for n, column in shown.items()}, cells.index, dtype=str)


def named_columns(cells: DataFrame, names: Sequence[str]) -> list[str]:
    """Return the columns that are meant by their names or headings.

    Raises:
        BadValueError: there is no such column.
    """
    return [_known(cells, f"--columns {','.join(names)}", name) for name in names]


def _typed(value: object) -> str:
    text = plain(value)
    is_fraction = isinstance(value, float) and text not in ("", "inf", "-inf") and "." in text
    return number(value, 4) if is_fraction else " ".join(text.split())


def _known(cells: DataFrame, option: str, name: str) -> str:
    """Return the column that is meant by its name or by its heading."""
    name = name if name in cells else (headings(cells) | TEXTS).get(name, name)
    if name not in cells:
        all_of_them = "all columns stand in the parquet file"
        meant = did_you_mean(name, map(str, cells.columns), lambda n: f"--columns {n}", all_of_them)
        raise BadValueError(f"`{option}`: the table has no column `{name}`{meant}")
    return name
