"""From an older schema of the record to this one, step by step; a newer one is refused.

A version is raised when a reader could misread an older record: a column gets another meaning, or a
name changes. A column that is only new needs no step, since every reader takes it for missing.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vitsweep.errors import VitsweepError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

SCHEMA_VERSION = 3

UTILISATION = ("mfu", "hfu", "mfu_of_measured_peak")
PER_SECOND = (
    "images_per_second",
    "images_per_second_per_rank",
    "tokens_per_second",
    "model_tflops_per_rank",
    *UTILISATION,
)
"""Columns in proportion to throughput."""

Changes = Mapping[str, Mapping[str, Any]]
"""Section of the record (`metrics, validity, ...`) -> column -> its value from now on."""


class NewerSchemaError(VitsweepError):
    """A record was written by a later version of vitsweep than this one."""


def _no_zero_utilisation(row: Mapping[str, Any], samples: Mapping[str, Any]) -> Changes:
    """1 -> 2: a run without a counted step has no utilisation; version 1 wrote zero."""
    if _missing(row.get("images_per_second")):
        return {"metrics": {c: None for c in UTILISATION if row.get(c) == 0}}
    return {}


def _throughput_of_window(row: Mapping[str, Any], samples: Mapping[str, Any]) -> Changes:
    """2 -> 3: the step time is elapsed time / steps on the slowest rank, no longer a median.

    Computed from the raw step times. A row of a table comes without them: it keeps its median and
    says so in `throughput_from`.
    """
    if _missing(row.get("step_time_ms")):
        return {}
    first, skipped = samples.get("warm_up_steps", 0), samples.get("skipped", [])
    kept = [step for step in range(first, len(skipped)) if not skipped[step]]
    ranks = [[times[step] for step in kept] for times in samples.get("step_time_ms", [])]
    if not kept or not ranks or any(None in times for times in ranks):
        return {"validity": {"throughput_from": "median"}}
    slowest, fastest = max(ranks, key=sum), min(ranks, key=sum)
    step_ms, median_ms = sum(slowest) / len(kept), statistics.median(slowest)
    factor = row["step_time_ms"] / step_ms
    metrics = {c: row[c] * factor for c in PER_SECOND if not _missing(row.get(c))}
    if not _missing(hours := row.get("epoch_hours_imagenet1k")):
        metrics["epoch_hours_imagenet1k"] = hours / factor
    metrics |= {
        "step_time_ms": step_ms,
        "step_time_median_ms": median_ms,
        "step_time_mean_over_median": step_ms / median_ms,
        "rank_skew_ms": (sum(slowest) - sum(fastest)) / len(kept),
        "window_seconds": sum(slowest) / 1e3,
    }
    return {"metrics": metrics, "validity": {"throughput_from": "window"}}


STEPS: dict[int, Callable[[Mapping[str, Any], Mapping[str, Any]], Changes]] = {
    1: _no_zero_utilisation,
    2: _throughput_of_window,
}
"""Version -> what turns a record of it into one of the next: (flat row, raw samples) -> changes.

A step stays as it is when later versions define a column anew.
"""


def upgraded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed JSON of a run record as one of `SCHEMA_VERSION`.

    Args:
        tree: as `json.loads` returned it, with a whole `schema_version`.

    Raises:
        NewerSchemaError: it is of a later schema.
        ValueError: it is of a schema that never was, or not a whole record.
    """
    found = dict(tree)
    for version in _versions_from(found["schema_version"]):
        parts = {name: part for name, part in found.items() if isinstance(part, dict)}
        samples = parts.pop("samples", {})
        for section, changes in STEPS[version](_flat(parts), samples).items():
            found[section] = {**(found.get(section) or {}), **changes}
    return found | {"schema_version": SCHEMA_VERSION}


def upgraded_rows(table: "DataFrame", source: str) -> "DataFrame":
    """Return a table of runs or cells, as a parquet file holds it, with all rows upgraded.

    Args:
        table: a table without `schema_version` is taken as it is.
        source: where it comes from, for the text of an error.

    Raises:
        NewerSchemaError: a row is of a later schema.
        VitsweepError: a row is of a schema that never was.
    """
    import pandas as pd  # not above: `Status` and `RunRecord` are read where no table is

    if "schema_version" not in table:
        return table
    versions = pd.to_numeric(table["schema_version"], errors="coerce")
    changed: dict[str, Any] = {}
    for version in sorted({int(v) for v in versions.dropna()}):
        try:
            steps = _versions_from(version)
        except NewerSchemaError as error:
            raise NewerSchemaError(f"{source}: {error}") from error
        except ValueError as error:
            raise VitsweepError(f"{source}: {error}.") from error
        for index, row in table[versions == version].iterrows() if steps else ():
            flat: dict[str, Any] = {str(k): v for k, v in row.items()}
            for step in steps:
                for column, value in _flat(STEPS[step](flat, {})).items():
                    flat[column] = value
                    changed.setdefault(column, _column(table, column))[index] = value
    return table.assign(**changed, schema_version=versions.where(versions.isna(), SCHEMA_VERSION))


def _flat(parts: Changes) -> dict[str, Any]:
    return {column: value for part in parts.values() for column, value in part.items()}


def _column(table: "DataFrame", column: str) -> "Series[Any]":
    import pandas as pd

    known = column in table
    return table[column].copy() if known else pd.Series(None, table.index, dtype=object)


def _versions_from(version: int) -> range:
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"schema {version} is newer than this vitsweep reads ({SCHEMA_VERSION}): update vitsweep"
        )
    if version < 1:
        raise ValueError(f"there never was a schema {version}")
    return range(version, SCHEMA_VERSION)


def _missing(value: Any) -> bool:
    return value is None or value != value
