"""The type of each column of `runs.parquet` and `cells.parquet`: the same in every sweep that has it."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from vitsweep.files import replacing
from vitsweep.results.metrics import COLUMNS, METRICS, Type, own_metrics
from vitsweep.results.record import SCHEMA_VERSION
from vitsweep.spec.cell_spec import GROUPS, GROUPS_WITH_NAME, CellSpec
from vitsweep.spec.from_yaml import hints_of
from vitsweep.spec.menu import choices, class_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_PANDAS: Mapping[Type, Any] = {
    "int64": "Int64",
    "double": "float64",
    "bool": "boolean",
    "string": "str",
}
_OF_CELLS = ("unadjusted_images_per_second throughput_spread speedup speedup_low speedup_high peak_gib "
             "first_compile_seconds").split()  # fmt: skip
"""Metrics that tables of cells alone have."""
_NUMBERS = (int, float, np.number, np.bool_)
SCHEMA_KEY = b"vitsweep.schema_version"
"""Of the metadata of a file."""


@cache
def spec_types() -> dict[str, Type]:
    """Return the type of each field of the spec, `sharding.bucket_mib`, over all choices of the menu."""
    kinds: dict[str, set[type]] = {}
    for group, part in hints_of(CellSpec).items():
        has_choices = group in GROUPS or group in ("model", "data")
        classes = [part, *(class_of(group, c) for c in (choices(group) if has_choices else ()))]
        for cls in (c for c in classes if isinstance(c, type) and is_dataclass(c)):
            for name, hint in hints_of(cls).items():
                kinds.setdefault(f"{group}.{name}", set()).update(_kinds(hint))
    return {column: _type(found) for column, found in kinds.items() if dict not in found}


def _kinds(hint: Any) -> Iterator[type]:
    """Yield the types of values that an annotation allows, but for None."""
    origin = get_origin(hint)
    if origin is Literal:
        yield from map(type, get_args(hint))
    elif origin in (Union, UnionType):
        for one in get_args(hint):
            yield from _kinds(one)
    elif origin is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif hint is not type(None):
        yield origin or hint


def _type(kinds: set[type]) -> Type:
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    return "double" if kinds and kinds <= {int, float} else "string"


OF_OTHER_OBJECTIVES = frozenset(
    "objective held_out_loss probe_top1 feature_spread prototype_information collapsed".split()
)
"""Columns that no table of classifiers has."""


def core_columns(rows: Literal["cells", "runs"]) -> dict[str, Type | None]:
    """Return the columns that every table has, in their order, with their types."""
    of_cells = rows == "cells"
    kinds = {"head", "validity", "environment", "comparison" if of_cells else "run"}
    known = [name for name, column in COLUMNS.items() if column.kind in kinds]
    before = [
        c for c in known if COLUMNS[c].kind in ("head", "run") and (of_cells or c != "blocks")
    ]
    spec = [c for c, column in COLUMNS.items() if column.kind == "spec"]
    metrics = [m for m in METRICS if m not in known and (of_cells or m not in _OF_CELLS)]
    choices_ = [*GROUPS, *GROUPS_WITH_NAME]
    ordered = (
        *before,
        *choices_,
        *spec,
        *metrics,
        *(c for c in known if COLUMNS[c].kind not in ("head", "run")),
    )
    return {column: type_of(column) for column in ordered if column not in OF_OTHER_OBJECTIVES}


def type_of(column: str) -> Type | None:
    """Return the type of a column, or None for a column of the user's."""
    if column in COLUMNS:
        return COLUMNS[column].type
    if column in METRICS or column.removesuffix("_sd") in METRICS:
        return "double"
    if column.startswith("predicted_"):
        return "string" if column == "predicted_at" else "double"
    if column in GROUPS or column in GROUPS_WITH_NAME or column.endswith("_reason"):
        return "string"
    return spec_types().get(column)


def write_table(table: "DataFrame", path: Path, core: Mapping[str, Type | None]) -> None:
    """Write a table as parquet with the types of its columns; what a column cannot hold is missing.

    Columns that are not in `core` and have no value are left out. The user's come last: numbers are
    double, all else is text.

    Args:
        table: rows of a sweep.
        path: of the file.
        core: columns that the file has in any case, with their types.
    """
    import pyarrow as pa
    from pandas import DataFrame, Series
    from pyarrow import parquet

    known = {**core, **{str(c): type_of(str(c)) for c in table if c not in core}}
    own = {c for c, kind in known.items() if kind is None}
    types: dict[str, Type] = {}
    for column in sorted(known, key=lambda c: c in own):
        if column in core or column in own_metrics(table) or table[column].notna().any():
            found = table[column].dropna() if known[column] is None else ()
            are_numbers = all(isinstance(value, _NUMBERS) for value in found)
            types[column] = known[column] or ("double" if are_numbers else "string")
    nothing = Series(None, table.index, dtype=object)
    texts = {c: _typed(table.get(c, nothing), kind) for c, kind in types.items()}
    schema = pa.schema([(column, pa.type_for_alias(kind)) for column, kind in types.items()])
    found = pa.Table.from_pandas(DataFrame(texts, table.index), schema, preserve_index=False)
    version = {SCHEMA_KEY: str(SCHEMA_VERSION).encode()}
    with replacing(path) as draft:
        parquet.write_table(found.replace_schema_metadata(found.schema.metadata | version), draft)


def _typed(values: "Series[Any]", kind: Type) -> "Series[Any]":
    if kind == "string":  # whole numbers became floats where one is missing among them
        values = values.map(_text, na_action="ignore")
    try:
        with np.errstate(invalid="raise"):  # of a number beyond 64 bits
            return values.astype(_PANDAS[kind])
    except (TypeError, ValueError, ArithmeticError):  # of a record that somebody changed
        return values.map(lambda v: _fitting(v, kind)).astype(_PANDAS[kind])


def _text(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_whole else str(value)


def _fitting(value: Any, kind: Type) -> Any:
    is_number = isinstance(value, _NUMBERS) and value == value
    fits = is_number and (kind != "int64" or (abs(value) < 2**63 and value == int(value)))
    return value if fits else None
