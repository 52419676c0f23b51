"""Which column of a table is what: the parts of the record, and the spec columns that vary."""

from pandas import DataFrame, Series

from vitsweep.results.metrics import METRICS
from vitsweep.spec.technique import TECHNIQUE_GROUPS

HEAD = (
    "schema_version",
    "cell_id",
    "sweep",
    "status",
    "reason",
    "attempt",
    "failed_rank",
    "blocks",
)
RUN_ONLY = ("run_id", "block", "position")
CHOICES = (*TECHNIQUE_GROUPS, "model", "data", "task", "batch", "measurement")
PLAIN_SPEC = (
    "half_dtype",
    "images_per_step",
    "accumulation_steps",
    "resolution_px",
    "num_tokens",
    "nodes",
    "ranks_per_node",
    "world_size",
    "seed",
)
COMPARISON = (
    "speedup",
    "speedup_low",
    "speedup_high",
    "claim",
    "p_value",
    "p_holm",
    "num_pairs",
    "baseline_cell_id",
    "speedup_note",
)
FLAGS = ("oversubscribed", "shared_device", "throttled", "drifting")
VALIDITY = (*FLAGS, "proved", "steps_skipped", "steps_counted")
SET_FIELDS = ("resolution_px", *(f"{group}." for group in (*TECHNIQUE_GROUPS, "model")))
"""Fields that a user sets, beside the choices."""
FROM_DATA = ("model.frames", "model.in_channels", "model.num_classes")
"""Fields of those groups that nobody sets: the data says them."""
BOOKKEEPING = ("measurement",)
"""Spec columns that change how sure a number is, not what was run."""


def spec_columns(table: DataFrame) -> list[str]:
    """Return the columns that say what was asked: choices first, then numbers, then fields."""
    named = [c for c in (*CHOICES, *PLAIN_SPEC) if c in table]
    return named + [str(c) for c in table if "." in str(c)]


def metric_columns(table: DataFrame) -> list[str]:
    """Return the measured columns in the order of `METRICS`."""
    return [c for c in METRICS if c in table]


def predicted_columns(table: DataFrame) -> list[str]:
    """Return the columns that were predicted before the run: `predicted_<metric>`."""
    return [str(c) for c in table if str(c).startswith("predicted_")]


def environment_columns(table: DataFrame) -> list[str]:
    """Return what is neither head, spec, metric, prediction, comparison nor validity."""
    measured = {*METRICS, *predicted_columns(table), *COMPARISON, *VALIDITY}
    other = {*HEAD, *RUN_ONLY, *spec_columns(table), *measured}
    return [str(c) for c in table if c not in other]


def varying(table: DataFrame) -> list[str]:
    """Return the spec columns that tell cells apart: every choice that varies, then numbers.

    What follows from the choices (`precision.master_weights` from `precision`) is left out, and so
    is a size that follows from the columns before it (`num_tokens` from `resolution_px`). Fields of
    techniques and models that were set together (a learning rate, and a weight decay with it) are all
    shown, and so is the resolution: which of them made the difference is not for the table to say.
    """
    columns = [c for c in _sizes_first(spec_columns(table)) if c not in BOOKKEEPING]
    different = [c for c in columns if _varies(table[c])]
    keys = comparable(table[different])
    choices = [c for c in different if c in CHOICES]
    kept = list(choices)
    for column in different[len(choices) :]:
        was_set = column.startswith(SET_FIELDS) and column not in FROM_DATA
        if not _follows(keys, column, choices if was_set else kept):
            kept.append(column)
    return kept


def _follows(keys: DataFrame, column: str, before: list[str]) -> bool:
    """Tell whether rows that are equal in the columns `before` are equal in this one too."""
    told_apart = len(keys[before].drop_duplicates()) if before else 1
    return len(keys[[*before, column]].drop_duplicates()) == told_apart


def comparable(table: DataFrame) -> DataFrame:
    """Return every value as text, missing ones as empty text, so that rows can be told apart."""
    return table.astype(object).where(table.notna(), "").astype(str)


def _varies(values: Series) -> bool:
    """Tell whether a column has several values; they are compared as text, for lists have no hash.

    A missing field is a value (fp32 has no loss scale); a missing choice is one nobody knows.
    """
    known = values.notna()
    missing_counts = values.name not in CHOICES and not known.all()
    return len(set(map(str, values[known].tolist()))) + missing_counts > 1


def _sizes_first(columns: list[str]) -> list[str]:
    """Put the world before its parts: 8 ranks say more than 8 ranks per node."""
    return sorted(columns, key=lambda c: (c not in CHOICES, c != "world_size"))
