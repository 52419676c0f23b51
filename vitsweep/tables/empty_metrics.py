"""Metrics of the user's that have no value in runs that were measured, and why, in one sentence each."""

from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import definitions_of, users_columns
from vitsweep.tables.code_states import newest_code
from vitsweep.tables.formatting import count
from vitsweep.tables.read_store import runs_of

LONGEST_REASON = 300
"""Characters that a sentence shows of what a function raised or returned."""


def empty_metrics_of(store: Store) -> list[str]:
    """Return the sentences of a sweep's runs; they are read only where it has metrics of the user's."""
    return empty_metrics(newest_code(runs_of(store))) if definitions_of(store) else []


def empty_metrics(runs: DataFrame) -> list[str]:
    """Return one sentence for each of the user's metrics that could not be computed in some runs.

    Args:
        runs: one row per run; those that were measured before a metric was defined do not count.
    """
    if "status" not in runs:
        return []
    measured = runs[runs["status"] == Status.measured]
    columns = [metric.column for metric in users_columns()]
    known = [c for c in columns if {c, f"{c}_reason"} <= set(measured.columns)]
    return [_sentence(c, measured) for c in known if measured[f"{c}_reason"].notna().any()]


def _sentence(column: str, measured: DataFrame) -> str:
    reason = f"{column}_reason"
    empty = measured[reason].notna()
    computed = empty | measured[column].notna()
    reasons = measured.loc[empty, reason].map(lambda text: " ".join(str(text).split()))
    common, *others = reasons.value_counts().index
    shown = common if len(common) <= LONGEST_REASON else f"{common[: LONGEST_REASON - 1]}…"
    more = (
        f" {count(len(others), 'more reason')} in `{reason}` of `runs.parquet`." if others else ""
    )
    return (
        f"The metric `{column}` has no value in {empty.sum():,} of {count(computed.sum(), 'run')}: "
        f"{shown.removesuffix('.')}.{more}"
    )
