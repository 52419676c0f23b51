"""Text of values, columns and tables, the same in terminal, Markdown and HTML."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import COLUMNS, FLAGS

BASELINE = "baseline"
"""Name and claim of a cell that differs in nothing from the one it is compared with."""
LARGEST, SMALLEST = 1e12, 1e-6
"""Numbers from the first on, or below the second, are shown with an exponent: no column is that wide."""
LONGEST_WORD = 40
"""Texts are cut before a word of at most so many characters, and within a longer one, a path say."""


def missing(value: Any) -> bool:
    """Return whether a value is None, NaN, NA or the empty text."""
    if type(value) is str or type(value) is float:  # most are: 100,000 rows have millions of them
        return not value if type(value) is str else value != value
    return not isinstance(value, (list, tuple, dict)) and bool(pd.isna(value) or value == "")


def plain(value: Any) -> str:
    """Return a value as a user types it: 3.0 becomes `3`, a missing value the empty text."""
    if missing(value):
        return ""
    whole_number = isinstance(value, float) and value.is_integer() and abs(value) < LARGEST
    return str(int(value)) if whole_number else str(value)


def as_text(table: DataFrame) -> DataFrame:
    """Return the table with every value as text."""
    return DataFrame({c: table[c].map(plain).astype(str) for c in table}, index=table.index)


def text_rows(table: DataFrame) -> list[dict[str, str]]:
    """Return the rows with every value as text, also of a table without columns."""
    rows = as_text(table).to_dict("records") if len(table.columns) else [{}] * len(table)
    return [{str(column): str(text) for column, text in row.items()} for row in rows]


def number(value: Any, digits: int = 3) -> str:
    """Return a number with `digits` significant digits: 0.0123, 1.23, 1,230; 1.23e+15 beyond all units."""
    if missing(value) or not math.isfinite(float(value)):
        return ""
    if value == 0:
        return "0"
    if not SMALLEST <= abs(value) < LARGEST:
        return f"{float(value):.{digits - 1}e}"
    return f"{float(value):,.{max(digits - 1 - _magnitude(value, digits), 0)}f}"


def _magnitude(value: float, digits: int) -> int:
    """Return the power of ten of the first digit, after rounding to so many digits: 2 for 99.96 and three."""
    return int(f"{float(value):.{digits - 1}e}".partition("e")[2])


def shortened(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, cut in its middle: both ends distinguish names."""
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[: limit - 1 - half]}…{text[len(text) - half :]}"


def count(how_many: Any, noun: str) -> str:
    """Return `1 block` or `5 blocks`."""
    return f"{int(how_many):,} {noun}{'' if int(how_many) == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return `1 h 05 min`, `2 min 07 s` or `9 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def percent(value: Any) -> str:
    """Return a fraction as a percentage with one decimal."""
    return "" if missing(value) else f"{100 * float(value):.1f} %"


def ratio(value: Any, low: Any = None, high: Any = None, claim: Any = "") -> str:
    """Return a ratio with its interval, `1.51x [1.48, 1.55]`, or `1.51x (no interval)`.

    All that is shown goes through here. A baseline is 1 by definition: `1.00x`.
    """
    if missing(value):
        return ""
    has_interval = not (missing(low) or missing(high) or claim == BASELINE)
    places = _places(value, low, high) if has_interval else _places(value)
    text = _fixed(value, places) + "x"
    if claim == BASELINE:
        return text
    return f"{text} {interval(value, low, high) or '(no interval)'}"


def interval(middle: Any, low: Any, high: Any) -> str:
    """Return the interval of a ratio, `[1.48, 1.55]`, as `ratio` shows it; empty where there is none."""
    if missing(low) or missing(high):
        return ""
    places = _places(middle, low, high)
    return f"[{_fixed(low, places)}, {_fixed(high, places)}]"


MOST_PLACES = 9
"""Digits after the point of a ratio; smaller ones have an exponent."""


def _fixed(value: float, places: int) -> str:
    return f"{float(value):,.{places}f}" if places <= MOST_PLACES else f"{float(value):.1e}"


def _places(middle: float, *ends: float) -> int:
    """Return the digits after the point of a ratio and of both ends of its interval.

    Two; one from 10 on, none from 100 on. More where the ratio would have less than two digits, where a lower
    end above 0 would read 0, and where an end would read 1 that is not: [0.72, 0.997] excludes 1, and
    [0.72, 1.00] would not.
    """
    places = max(2 - max(_magnitude(middle, 3), 0), 1 - _magnitude(middle, 2), 0)
    while places < MOST_PLACES and any(
        (float(f"{e:.{places}f}") in (0, 1)) and e not in (0, 1) for e in ends
    ):
        places += 1
    return places


def whole(value: Any) -> str:
    """Return a count, `1,024`; the empty text where it is missing."""
    return "" if missing(value) else f"{int(value):,}"


def status_words(value: Any) -> str:
    """Return a status as words, `out of memory`; `not run` where it is missing."""
    return plain(value).replace("_", " ") or "not run"


def tally(statuses: Iterable[Any]) -> str:
    """Return how often each status occurs, the most frequent first: `5 measured, 1 out of memory`."""
    found = Counter(map(status_words, statuses)).most_common()
    return ", ".join(f"{number} {status}" for status, number in found)


def span(values: Iterable[Any], write: Callable[[Any], str]) -> str:
    """Return the texts of the least and the largest value, `3 to 5`; one where they are the same."""
    known = [value for value in values if not missing(value)]
    return " to ".join(dict.fromkeys(write(e) for e in (min(known), max(known)))) if known else ""


def status(row: Mapping[Any, Any] | Series) -> str:
    """Return the status with its reason and the validity flags that are set."""
    text = status_words(row.get("status"))
    notes = [flag.replace("_", " ") for flag in FLAGS if not missing(row.get(flag)) and row[flag]]
    if not missing(row.get("reason")):
        notes = [" ".join(str(row["reason"]).split()), *notes]
    return f"{text}: {'; '.join(notes)}" if notes else text


def cell_label(row: Series, columns: list[str]) -> str:
    """Return the values of `columns` in one label, `O2 · 8 ranks`."""
    return " · ".join(name for c in columns if (name := value_label(c, plain(row.get(c)))))


def value_label(column: str, value: str) -> str:
    """Return a value as part of a label; the empty text where it is missing.

    A number, `none`, a truth value, or the value of a technique's setting gets its column as a prefix:
    `ring=2`, `gradient_dtype=bfloat16`.
    """
    if column in COLUMNS and COLUMNS[column].noun and value.isdigit():
        return count(value, COLUMNS[column].noun)
    if column == "resolution_px" and value:
        return f"{value} px"
    _, is_setting, key = column.rpartition(".")
    bare = value in ("none", "True", "False") or value.replace(".", "", 1).isdigit()
    return f"{key}={value}" if value and (is_setting or bare) else value


def cut_at_word(text: str, most: int) -> str:
    """Return at most so many characters of a text, cut between two words, or within one that is long."""
    if len(text) <= most:
        return text
    head = text[: most - 1]
    words, _, cut = head.rpartition(" ")
    return f"{words if words and len(cut) <= LONGEST_WORD else head}…"


# Tables of text.

Column = Callable[[DataFrame], list[str]]
"""Table -> the texts of one column."""


def distinct(table: DataFrame, column: str, most: int = 3) -> str:
    """Return the distinct values of a column, `a, b, c and 2 more`."""
    if column not in table:
        return ""
    found = list(dict.fromkeys(table[column].dropna().astype(str)))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def values(column: str, write: Callable[[Any], str] = plain) -> Column:
    """Return the texts of a column; all empty where the table has no such column."""
    return lambda table: [
        write(v) for v in table.get(column, Series("", table.index, dtype=object))
    ]


def ratios(column: str) -> Column:
    """Return the texts of a column of ratios."""
    names = (column, f"{column}_low", f"{column}_high", "claim")
    return lambda table: [
        ratio(*row) for row in zip(*(table.get(c, [None] * len(table)) for c in names), strict=True)
    ]


def with_interval(
    column: str, write: Callable[[Any], str], end: Callable[[Any], str], ends: str = ""
) -> Column:
    """Return texts such as `+12.1 [+11.8, +12.4]`, without brackets where there is no interval.

    Args:
        column: of the values.
        write: makes the text of a value.
        end: makes the text of an end of the interval.
        ends: pattern of the columns of the ends, `step_time_{}_ms`; that of `<column>_low` if empty.
    """
    names = [(ends or f"{column}_{{}}").format(side) for side in ("low", "high")]

    def texts(table: DataFrame) -> list[str]:
        rows = zip(*(table.get(c, [None] * len(table)) for c in (column, *names)), strict=True)
        return [
            "" if missing(value)
            else write(value)
            if missing(low) or missing(high)
            else f"{write(value)} [{end(low)}, {end(high)}]"
            for value, low, high in rows
        ]  # fmt: skip

    return texts


def with_spread(column: str, write: Callable[[Any], str]) -> Column:
    """Return the texts of a column, with the standard deviation over repetitions where there is one."""
    means, deviations = values(column, write), values(f"{column}_sd", write)

    def texts(table: DataFrame) -> list[str]:
        pairs = zip(means(table), deviations(table), strict=True)
        return [
            f"{mean.removesuffix(' %') if sd.endswith(' %') else mean} ± {sd}"
            if mean and sd
            else mean
            for mean, sd in pairs
        ]

    return texts


def text_columns(
    table: DataFrame, shown: Mapping[str, Column], always: Sequence[str] = ()
) -> DataFrame:
    """Return a table of text with the headings of `shown`; empty columns are left out but `always`."""
    text = DataFrame({h: column(table) for h, column in shown.items()}, table.index, dtype=str)
    text.attrs = table.attrs
    return text.loc[:, [c for c in text if c in always or (text[c] != "").any()]]


def markdown(text: DataFrame) -> str:
    """Return a table of text as GitHub Markdown."""
    lines = [
        list(map(str, text)),
        ["---"] * len(text.columns),
        *text.astype(str).to_numpy().tolist(),
    ]
    cells = [[value.replace("|", "\\|") for value in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


_FORMULA = re.compile(r"\s*[=+\-@\t\r\uff1d\uff0b\uff0d\uff20]")
"""How a text begins that a spreadsheet would compute; the last four are full-width forms."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE | re.ASCII)


def csv_text(table: DataFrame) -> str:
    """Return a table as CSV; a text that a spreadsheet would compute (`=cmd|...`) gets an apostrophe."""
    texts = table.select_dtypes(["object", "string"])
    plain = table.assign(**{str(c): texts[c].map(_no_formula) for c in texts})
    return str(plain.rename(columns=_no_formula).to_csv(index=False))


def _no_formula(value: Any) -> Any:
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
