"""Files that somebody else may have written: bounds first, then plain values.

Plain values are dicts, lists, texts, numbers of 64 bits, booleans and None. What a file may hold is counted
before it is parsed, so that a small file can fill neither the memory nor the day of whoever reads it.
"""

import io
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from vitsweep.errors import VitsweepError
from vitsweep.files import read_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_YAML_BYTES = 2**20
MOST_JSON_BYTES = 2**27
MOST_NUMBERS = 4_000_000
"""Of one JSON text; a record holds up to 1,500,000. A number takes 32 bytes of memory."""
MOST_EVENTS = 20_000
"""Of one YAML text: starts, ends and values; a frozen cell has some 400, and 1 MiB could have 700,000."""
MOST_LEVELS = 100
MOST_DIGITS = 100
"""Of a number in YAML: one of base 60 takes time with the square of its length."""
MOST_COLUMNS = 1_000
"""Of a table: a run of vitsweep's has some 210, a cell 260."""
MOST_ROW_SIZE = 100_000
"""Of a row of a table in characters, list entries and keys: some 800 in a run of vitsweep's."""
MOST_TABLE_VALUES, MOST_TABLE_BYTES = 2**25, 2**29
"""Of a parquet file: 100,000 runs of 335 columns. Bytes are those after decompression."""


class Bounds(NamedTuple):
    """How much of a JSON text are names and structure, of which each takes a hundred bytes of memory."""

    texts: int
    sections: int


OF_RUN = Bounds(20_000, 20_000)
"""A record has some 260 texts and 14 sections, and 130 sections where it holds the steps of 64 ranks."""
OF_SWEEP = Bounds(4_000_000, 1_000_000)
"""What lists the cells of a sweep: a command for 10,000 cells has 30,000 texts."""


class ForeignFileError(VitsweepError, ValueError):
    """A file breaks a bound or a rule of its format; it is named."""


def foreign(path: Path) -> Any:
    """Return the plain values of a file of YAML, or of JSON where its name ends otherwise.

    Raises:
        ForeignFileError: it breaks a bound, or is no such text.
        OSError: it cannot be read.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    content = read_bytes(path, MOST_YAML_BYTES if is_yaml else MOST_JSON_BYTES)
    try:
        return parsed_yaml(content) if is_yaml else parsed_json(content.decode(), OF_SWEEP)
    except ValueError as error:
        raise ForeignFileError(
            f"`{path}` is not read: {error}. Restore it from a backup, or remove it."
        ) from error


# YAML

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: thousands of cells are frozen at once."""
_NUMBER = re.compile(r"[-+.\d][\d_:.eE+-]*")


def parsed_yaml(text: str | bytes) -> Any:
    """Read one YAML document of plain values, without anchors, aliases and tags.

    Raises:
        ValueError: the text is no such document, or larger or deeper than one.
    """
    _require(bytes=(len(text), MOST_YAML_BYTES))
    try:
        level = 0
        for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
            _require(values=(number, MOST_EVENTS))
            for what in ("anchor", "tag"):  # an alias has the name of its anchor
                if found := getattr(event, what, None):
                    raise ValueError(f"it has the {what} `{found[:40]}`, and none is followed")
            level += isinstance(event, yaml.CollectionStartEvent)
            level -= isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS:
                raise ValueError(_TOO_DEEP)
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_DIGITS:
                if event.implicit[0] and _NUMBER.fullmatch(event.value):
                    raise ValueError(f"it has a number of more than {MOST_DIGITS} digits")
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no YAML ({type(error).__name__})") from error
    _check_plain([tree])
    return tree


def _check_plain(tree: list[Any]) -> None:
    for value in tree:
        if isinstance(value, dict):
            _check_plain([*value, *value.values()])
        elif isinstance(value, list):
            _check_plain(value)
        elif not isinstance(value, str | float | bool | None):
            if not isinstance(value, int) or not -(2**63) <= value < 2**63:
                raise ValueError(f"it has a {type(value).__name__} that no setting holds")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes what is there twice, twice: no reader follows aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def yaml_text(document: dict[str, Any]) -> str:
    """Return a document as YAML that `parsed_yaml` reads."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False)
    return text


# JSON

_CONTROL = re.compile(
    r"(\\\\)|\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\[bfr]|[\x7f-\x9f]", re.IGNORECASE
)
_LONG = re.compile(r"\d{19}")
_TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep"


def parsed_json(text: str, most: Bounds = OF_RUN) -> Any:
    """Read JSON; numbers that are not finite are None, integers that no column holds are floats.

    Raises:
        ValueError: the text is no JSON, or holds more than `most` allows.
    """
    _check_counts(text, most)
    if not text.isascii() or "\\" in text or "\x7f" in text:  # far slower to search than to look so
        text = _CONTROL.sub(lambda found: found[1] or "?", text)  # what would steer a terminal
    is_short = len(text) < 2**16 or _LONG.search(text)
    number = column_number if is_short else None  # far faster where integers are many
    try:
        tree = json.loads(text, parse_constant=lambda _: None, parse_int=number)
        _refuse_deep([tree], MOST_LEVELS)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return tree


def _check_counts(text: str, most: Bounds) -> None:
    """Refuse a text by what it can hold at most; a count takes a millisecond for 10 MB."""
    _require(
        characters=(len(text), MOST_JSON_BYTES),
        values=(text.count(","), MOST_NUMBERS),
        texts=(text.count('"') // 2, most.texts),
        sections=(text.count("[") + text.count("{"), most.sections),
        backslashes=(text.count("\\"), most.texts),
    )


def _refuse_deep(tree: Any, levels: int) -> None:
    """Raise RecursionError where a tree has more levels than whatever writes it again can follow."""
    if not levels:
        raise RecursionError
    for inner in tree.values() if tree.__class__ is dict else tree:
        if inner.__class__ in (dict, list):
            _refuse_deep(inner, levels - 1)


def column_number(digits: str) -> int | float | None:
    """Return an integer, a float where it has more than the 64 bits of a column, None beyond that."""
    if len(digits) < 19 or abs(int(digits)) < 2**63:
        return int(digits)
    return None if isinf(number := float(digits)) else number


def size_of(value: Any) -> int:
    """Return the characters of a text, or the entries and characters of all that a section holds."""
    if type(value) is str:
        return len(value)
    if type(value) not in (dict, list):
        return 0
    return len(value) + sum(map(size_of, value.values() if type(value) is dict else value))


def read_lines(path: Path, most: int = OF_SWEEP.sections) -> list[dict[str, Any]]:
    """Return the JSON lines of a file of a sweep, without those cut in half and other damage.

    Args:
        path: of the file.
        most: lines of such a file.

    Raises:
        ForeignFileError: they are more, or hold more than any sweep's.
    """
    try:
        content = read_bytes(path, MOST_JSON_BYTES)
        _require(lines=(content.count(b"\n"), most))
        return parsed_lines(content, OF_SWEEP)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ForeignFileError(
            f"`{path}` is not read: {error}. Restore it from a backup, or remove it."
        ) from error


def parsed_lines(content: bytes, most: Bounds = OF_RUN) -> list[dict[str, Any]]:
    """Return the JSON objects of a text with one per line, without the lines that hold none.

    Raises:
        ValueError: all lines together hold more than `most` allows.
    """
    _check_counts(content.decode("latin-1"), most)
    found = []
    for line in io.BytesIO(content):
        with suppress(ValueError):  # also where it is no UTF-8
            found.append(parsed_json(line.decode(), most))
    return [entry for entry in found if isinstance(entry, dict)]


# Parquet

_TEXTS = ("string", "large_string", "binary", "large_binary")


def foreign_table(path: Path, columns: Sequence[str] | None = None) -> "DataFrame":
    """Return a table of flat columns, after a look at how many values its footer says that it has.

    Args:
        path: of the file.
        columns: read these alone.

    Raises:
        ForeignFileError: it is no whole parquet file, or has more or other columns or more values than a
            table of vitsweep's.
        OSError: it cannot be read.
    """
    from pyarrow import ArrowException, parquet

    try:
        footer = parquet.read_metadata(path)
        counts = {"columns": (footer.num_columns, MOST_COLUMNS)}
        _require(**counts, rows=(footer.num_rows, MOST_TABLE_VALUES))
        groups = (footer.row_group(i) for i in range(footer.num_row_groups))
        parts = [group.column(i) for group in groups for i in range(footer.num_columns)]
        if columns is not None:
            parts = [part for part in parts if part.path_in_schema in columns]
        size = sum(part.total_uncompressed_size for part in parts)
        values = sum(part.num_values for part in parts)
        _require(values=(values, MOST_TABLE_VALUES), bytes=(size, MOST_TABLE_BYTES))
        schema = footer.schema.to_arrow_schema()
        if any(field.type.num_fields for field in schema) or len({*schema.names}) < len(schema):
            raise ValueError("it has lists, columns in columns, or a name twice")
        texts = [field.name for field in schema if str(field.type) in _TEXTS]
        # as a dictionary a text that stands in every row is in memory once
        file = parquet.ParquetFile(path, metadata=footer, read_dictionary=texts)
        table = file.read(columns).to_pandas(ignore_metadata=True)
        for name in {*texts} & {*table}:
            kept = table[name].cat
            table[name] = kept.rename_categories(kept.categories.astype(object)).astype(object)
        return table
    except (ArrowException, ValueError, TypeError, KeyError, MemoryError) as error:
        raise ForeignFileError(
            f"`{path}` is not a complete parquet file with a table of vitsweep's ({error}): restore it, or "
            "write it anew with `vitsweep collect`."
        ) from error


def _require(**found: tuple[int, int]) -> None:
    """Refuse what is more than its bound; each keyword names a count and its bound."""
    for what, (number, bound) in found.items():
        if number > bound:
            raise ValueError(f"it has {number} {what}, and at most {bound} are read")
