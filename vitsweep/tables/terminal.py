"""The result table in a terminal: as narrow as the terminal, and what is equal in all rows said once."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from pandas import DataFrame, Series
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from vitsweep.results.metrics import FLAGS, heading, headings, own_metrics
from vitsweep.results.record import Status
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.tables import formatting
from vitsweep.tables.names import ORDER, name_parts, varying
from vitsweep.tables.notes import half_precision_note
from vitsweep.tables.reasons import lines_of
from vitsweep.tables.show import ACCURACY, DIFFERENCE, MANY, SHOWN, ranked, shown_columns
from vitsweep.tables.valid_runs import checked_cells

BEST = 20
"""Rows that are shown unless all are asked for."""

GAP = 2
"""Characters between two columns."""

NARROWEST_NAME, NARROWEST_RESULT = 16, 13
"""Characters below which these columns are not folded, although the table becomes too wide."""

LONGEST_REASON = 300
"""Characters of a footnote; `coverage.csv` of the report has the whole reason."""

ALWAYS = (heading("images_per_second"), heading("speedup"))
DROPPED_FIRST = (
    heading("blocks"), heading("step_time_ms"), heading("peak_gib"), DIFFERENCE,
    ACCURACY, heading("accuracy_top1"), heading("seconds_to_target"),
)  # fmt: skip
"""Columns that a narrow terminal does without, the first one first."""

COMMON = ("model", "data", "world_size", "images_per_step")
"""Besides techniques that are not the plain ones: what the title says where it is the same everywhere."""

COLOURS = {
    "faster": "green",
    "slower": "red",
    "probably faster": "cyan",
    "probably slower": "yellow",
    "baseline": "bold",
    "no difference shown": "dim",
}


@dataclass(frozen=True)
class ResultTable:
    """A table that fits the console it is printed on, with its footnotes below.

    Columns that are empty are left out, and numbers that are the same in all rows are said once.
    A terminal too narrow for all columns does without some, which are named. Refused cells stand
    below the table, one line per reason.

    Attributes:
        cells: one row per cell.
        sweep: its name, as a command takes it.
        most_rows: how many are shown, besides the baselines of those shown.
        in_order: show the cells in the order given instead of the fastest first.
    """

    cells: DataFrame
    sweep: str
    most_rows: int = BEST
    in_order: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield title, table and footnotes for the width of the console."""
        cells = checked_cells(self.cells, *SHOWN)
        refused = cells["status"] == Status.invalid
        ran = cells[~refused] if self.in_order else ranked(cells[~refused])
        yield Text(" · ".join([f"Sweep {self.sweep}", *_common(ran)]), style="italic")
        if note := half_precision_note(ran):
            yield Text(note)
        if len(ran):
            yield from self._table(ran, options.max_width)
        yield from map(Text, lines_of(cells, refused))

    def _table(self, ran: DataFrame, width: int) -> Iterator[Table | Text]:
        shown = self._best(ran)
        notes = _Footnotes.of(shown)
        numbers, once = _said_once(_numbers(shown, notes))
        layout = _Layout.of(ran, shown, numbers, width)
        yield from layout.parts()
        yield Text("\n" + "; ".join([_tally(ran), *once]) + ".")
        if layout.left_out:
            yield Text(f"Too narrow for: {', '.join(layout.left_out)}.", style="dim")
        yield from (Text(line, style="dim") for line in notes.lines())
        if len(shown) < len(ran):
            rest = _tally(ran.drop(shown.index), "more ")
            yield Text(f"{rest}: `vitsweep collect {self.sweep} --rows all` shows them.")

    def _best(self, ran: DataFrame) -> DataFrame:
        """Return the first rows and the baselines that they are compared with."""
        if len(ran) <= self.most_rows:
            return ran
        first = ran.head(self.most_rows)
        baselines = ran["cell_id"].isin(first.get("baseline_cell_id", Series(dtype=object)))
        return ran[baselines | ran.index.isin(first.index)]


def as_table(text: DataFrame, title: str | None = None, widths: Sequence[int] = ()) -> Table:
    """Return a table of text for a terminal, its numbers to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False,
                  pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold")  # fmt: skip
    numeric = headings(text)
    for name, width in zip_longest(text, widths):
        right = name in numeric
        table.add_column(str(name), justify="right" if right else "left", overflow="fold",
                         no_wrap=right, width=width)  # fmt: skip
    for row in text.astype(str).to_dict("records"):
        style = COLOURS.get(str(row.get("result", "")).split(" [")[0], "")
        table.add_row(*(Text(value, style=style) for value in row.values()))
    return table


@dataclass(frozen=True)
class _Layout:
    """The rows as text that fits a width.

    Attributes:
        text: the columns.
        match: for each row the heading under which it stands; all empty for one table.
        left_out: columns for which there is no room.
        width: characters of a line.
    """

    text: DataFrame
    match: Series
    left_out: list[str]
    width: int

    @classmethod
    def of(cls, ran: DataFrame, shown: DataFrame, numbers: DataFrame, width: int) -> "_Layout":
        """Try every setting in a column of its own, then one column of what a cell changes."""
        optional = [c for c in DROPPED_FIRST if c in numbers]
        separate, names = _settings(ran, shown), name_parts(ran).loc[shown.index]
        change, match = names[["change"]].set_axis(["cell"], axis=1), names["match"]
        few = [separate] if len(separate.columns) <= MANY else []
        for settings in (*few, change):
            match_of = match if settings is change else match.mask(match != "", "")
            for dropped in range(len(optional) + 1):
                text = settings.join(numbers.drop(columns=optional[:dropped]))
                text.attrs = numbers.attrs
                if _width(text) <= width:
                    return cls(text, match_of, optional[:dropped], width)
        return cls(text, match, optional, width)

    def parts(self) -> Iterator[Table | Text]:
        """Yield the table, in parts with a heading each where the cells have different baselines."""
        widths = self._widths()
        for number, match in enumerate(sorted(set(self.match), key=_by_numbers)):
            table = as_table(self.text[self.match == match], widths=widths)
            table.show_header = number == 0
            if match and number == 0:
                yield Text(match, style="bold")
            elif match:
                yield Text(f"\n{match}", style="bold")
            yield table

    def _widths(self) -> list[int]:
        """Return the characters of each column; text gives way where all do not fit."""
        needed = {c: max(map(len, (str(c), *self.text[c]))) for c in self.text}
        folded = [c for c in ("result", *self.text) if c in needed and c not in headings(self.text)]
        for column, least in zip(folded, (NARROWEST_RESULT, *[NARROWEST_NAME] * 9), strict=False):
            excess = sum(needed.values()) + GAP * (len(needed) - 1) - self.width
            needed[column] = max(min(needed[column], least), needed[column] - max(excess, 0))
        return list(needed.values())


@dataclass
class _Footnotes:
    """Texts below a table, numbered in the order of the rows that refer to them.

    Attributes:
        marks: for each row of the table, such as ` [1]`.
    """

    marks: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _of_all: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, shown: DataFrame) -> "_Footnotes":
        """Number the reasons, notes and validity flags of the rows; a flag of all rows has no number."""
        notes = cls()
        measured = shown[shown["status"] == Status.measured]
        # a cell without a run has pd.NA, which is neither true nor false
        all_set = {c: shown[c].eq(True).fillna(False).astype(bool) for c in FLAGS if c in shown}
        set_ = {c: is_set for c, is_set in all_set.items() if is_set.any()}
        everywhere = [c for c, is_set in set_.items() if is_set[measured.index].all()]
        notes._of_all = [_explanation(flag) for flag in everywhere]
        for place, row in enumerate(shown.to_dict("records")):
            own = [c for c, is_set in set_.items() if c not in everywhere and is_set.iloc[place]]
            texts = [_one_line(row[c]) for c in ("reason", "speedup_note")]
            notes._refer([*filter(None, texts), *map(_explanation, own)])
        return notes

    def _refer(self, texts: Iterable[str]) -> None:
        numbers = [self._numbers.setdefault(text, len(self._numbers) + 1) for text in texts]
        self.marks.append("".join(f" [{number}]" for number in numbers))

    def lines(self) -> list[str]:
        return [
            *(f"[{number}] {text}" for text, number in self._numbers.items()),
            *(f"Note: {text}" for text in self._of_all),
        ]


def _explanation(flag: str) -> str:
    return FLAGS[flag].advice or f"{FLAGS[flag].caption[:1].upper()}{FLAGS[flag].caption[1:]}."


def _one_line(reason: object) -> str:
    if formatting.missing(reason):
        return ""
    line = " ".join(str(reason).split())
    return line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 1]}…"


def _settings(ran: DataFrame, shown: DataFrame) -> DataFrame:
    """Return a column of text for each setting that varies over all rows."""
    named = varying(ran) or [c for c in ("model", "precision", "sharding") if c in ran]
    return DataFrame({c: shown[c].map(formatting.plain) for c in named}, shown.index, dtype=str)


def _numbers(shown: DataFrame, notes: "_Footnotes") -> DataFrame:
    """Return what was measured as text, without empty columns; `result` is the claim or the status."""
    shown_first = (*ALWAYS, heading("replicates"), *reversed(DROPPED_FIRST))
    own = [metric.axis_label for metric in own_metrics(shown).values() if metric.column in shown]
    known = shown_columns(shown)
    text = {h: known[h](shown) for h in (*shown_first, *own)}
    if "replicates" in shown:
        text[heading("blocks")] = [""] * len(shown)  # their sum over repetitions says nothing
    results = [f"{word}{mark}" for word, mark in zip(_results(shown), notes.marks, strict=True)]
    columns = {h: text[h] for h in ALWAYS} | {"result": results} | text
    table = DataFrame(columns, shown.index, dtype=str)
    table.attrs = shown.attrs
    return table.loc[:, [c for c in table if c == ALWAYS[0] or (table[c] != "").any()]]


def _results(shown: DataFrame) -> list[str]:
    rows = zip(shown["status"], shown["claim"], strict=True)
    return [
        str(claim)
        if status == Status.measured and not formatting.missing(claim)
        else formatting.plain(status).replace("_", " ") or "not run"
        for status, claim in rows
    ]


def _said_once(text: DataFrame) -> tuple[DataFrame, list[str]]:
    """Take out the numbers that are the same in all rows; return what is left, and a text of each."""
    candidates = (heading("replicates"), *DROPPED_FIRST)
    equal = [c for c in candidates if c in text and len(text) > 1 and text[c].nunique() == 1]
    return text.drop(columns=equal), [f"{c}: {text[c].iloc[0]}" for c in equal]


def _by_numbers(text: str) -> list[int | str]:
    """Return a key that sorts `2 ranks` before `16 ranks`."""
    return [
        int(part) if part.isdecimal() else part
        for part in re.split(r"(\d+)", text.replace(",", ""))
    ]


def _width(text: DataFrame) -> int:
    return sum(max(map(len, (str(c), *text[c]))) + GAP for c in text) - GAP


def _common(ran: DataFrame) -> list[str]:
    """Return the settings that are the same in all rows: the techniques but the plain ones, and sizes."""
    techniques = [c for c in TECHNIQUE_GROUPS if c in ran and c in ORDER]
    same = [c for c in (*COMMON, *techniques) if c in ran and ran[c].nunique(dropna=False) == 1]
    told = [c for c in same if str(ran[c].iloc[0]) != ORDER.get(c, "").split(" ")[0] or c in COMMON]
    values = [(c, formatting.plain(ran[c].iloc[0])) for c in told]
    return [formatting.value_label(c, value) for c, value in values if value]


def _tally(cells: DataFrame, more: str = "") -> str:
    """Return `5 cells, all measured`, or `9 cells: 7 measured, 2 out of memory`."""
    statuses = [formatting.plain(s).replace("_", " ") or "not run" for s in cells["status"]]
    counts = Counter(statuses).most_common()
    row = "setting" if "replicates" in cells else "cell"
    noun = formatting.count(len(cells), f"{more}{row}")
    if len(counts) == 1:
        return f"{noun}, {'all ' if len(cells) > 1 else ''}{counts[0][0]}"
    return f"{noun}: {', '.join(f'{n} {status}' for status, n in counts)}"
