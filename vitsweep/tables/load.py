"""Read sweep folders and parquet files into one table."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd
from pandas import CategoricalDtype, DataFrame, Series, to_numeric

from vitsweep.errors import VitsweepError
from vitsweep.foreign import column_number, foreign_table
from vitsweep.results.metrics import GONE, METRICS, columns
from vitsweep.results.record import OtherSchemaError, RunRecord, Status, check_schema
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import attributes_of
from vitsweep.spec.cell_spec import spread
from vitsweep.spec.from_yaml import title_of
from vitsweep.spec.menu import plain_choice
from vitsweep.tables import names as col
from vitsweep.tables.cells import cells, typed
from vitsweep.tables.names import in_menu_order
from vitsweep.tables.sentences import say
from vitsweep.tables.valid_runs import checked, in_order

# The first timed steps against those of the baseline: a cell that leaves them is wrong.

SAME = {1: "same_first_loss", 2: "same_losses", 3: "same_losses"}
"""Step -> column that is equal for two cells whose losses in that step are alike."""
FIRST_SHARE = 0.08
"""Share of the tolerance of later losses that the first has: no update has multiplied its rounding."""
GRADIENTS = ("first_gradients", "gradient_tolerance")
"""Column of their sketch (see `training.shards`), and by how much two may differ with that of the other."""
COLUMNS = ("loss_tolerance", *dict.fromkeys(SAME.values()), *map("loss_step_{}".format, SAME))


def with_wrong_steps(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Let measured runs whose first steps leave those of their baseline in the same block be `wrong`.

    Both begin from the same weights and see the same images. The loss and the gradients before any update
    are compared where model, images and random draws agree; the losses after one and two updates, and the
    norm of all gradients, which may be clipped, where the definition of the optimizer does as well. They
    may differ by the tolerances of both cells, the first loss by `FIRST_SHARE` of that.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
    """
    if not {"block", *COLUMNS} <= set(runs.columns):
        return runs
    measured = runs.loc[runs["status"] == Status.measured]
    told = measured.reindex(columns=["cell_id", "block", *COLUMNS, *GRADIENTS])
    numbers = [*(f"loss_step_{step}" for step in SAME), GRADIENTS[1]]
    told[numbers] = told[numbers].apply(to_numeric)  # of runs without any, a column is all None
    base = told.drop_duplicates(["cell_id", "block"])
    told = told.assign(place=told.index)
    pairs = told.assign(baseline=told["cell_id"].map(baselines).astype(object)).merge(
        base.rename(columns={"cell_id": "baseline"}),
        on=["baseline", "block"],
        suffixes=("", "_base"),
    )
    pairs = pairs[pairs["cell_id"] != pairs["baseline"]]
    runs = runs.copy() if len(pairs) else runs
    for same, apart, allowed, told_of in _distances(pairs):
        wrong = (pairs[same] == pairs[f"{same}_base"]) & (apart > allowed)
        for _, row in pairs.assign(apart=apart, allowed=allowed)[wrong].iterrows():
            if runs.at[row["place"], "status"] == Status.measured:
                runs.at[row["place"], "status"] = Status.wrong.value
                runs.at[row["place"], "reason"] = say(
                    "wrong", what=told_of, apart=row["apart"], allowed=row["allowed"]
                )
    return runs


def _distances(pairs: DataFrame) -> Iterator[tuple[str, Series, Series, str]]:
    """Yield the column of what is comparable, distances, what is allowed, and what to say of a larger one.

    Columns of the baseline end in `_base`.
    """
    tolerance, rounding = (pairs[c] + pairs[f"{c}_base"] for c in ("loss_tolerance", GRADIENTS[1]))
    own, base = _sketches(pairs[GRADIENTS[0]]), _sketches(pairs[f"{GRADIENTS[0]}_base"])
    for step, same in SAME.items():
        loss, wanted = f"loss_step_{step}", f"loss_step_{step}_base"
        apart = (pairs[loss] - pairs[wanted]).abs() / pairs[wanted].abs()
        yield same, apart, (FIRST_SHARE if step == 1 else 1.0) * tolerance, f"loss of step {step}"
        if step == 1:
            apart = ((own - base).drop(columns=0) ** 2).mean(axis=1) ** 0.5
            yield SAME[1], apart, rounding, "gradient of step 1"
            yield SAME[2], (own[0] / base[0] - 1).abs(), rounding, "gradient of step 1"


def _sketches(texts: Series) -> DataFrame:
    """Return the numbers of sketches as columns, missing where there is none."""
    rows = [text.split() if isinstance(text, str) else [] for text in texts]
    return DataFrame(rows, texts.index, dtype=float).reindex(columns=range(5))


# Types of a loaded table: ordered categories, numbers, flags; and one device per comparison.


def tidy(table: DataFrame) -> DataFrame:
    """Return the table with choices as ordered categories, metrics as numbers, flags as booleans.

    Metrics that are not finite, or not above zero where they must be, are missing.

    Raises:
        VitsweepError: a metric holds text.
    """
    return checked(table).pipe(typed).pipe(ordered).copy()  # in one piece


def ordered(table: DataFrame) -> DataFrame:
    """Make technique, model and status columns categories in the order of the menu."""
    groups = [c for c in (*col.CHOICES, "status") if c in table]
    known = {c: table[c].dropna().astype(str) for c in groups}
    types = {
        c: CategoricalDtype(in_menu_order(c, v.unique()), ordered=True) for c, v in known.items()
    }
    return table.astype(types)


# The records of one sweep folder as rows.


def runs_of(store: Store, records: Iterable[RunRecord] | None = None) -> DataFrame:
    """Return one row per run of a store, oldest first, failed ones included; damaged records cause a warning.

    Args:
        store: a sweep folder.
        records: its records, where they have been read.
    """
    rows = rows_of(store, store.runs() if records is None else records)
    runs = in_order(from_rows(rows, attributes_of(store))).reset_index(drop=True)
    return with_wrong_steps(runs, store.baselines())


def rows_of(store: Store, records: Iterable[RunRecord]) -> Iterator[dict[str, Any]]:
    """Yield a row per record, with what was predicted for its cell.

    `sweep` is the folder's name, also where it was renamed or copied.
    """
    predicted: dict[str, dict[str, Any]] = {}
    for record in records:
        row, cell_id = record.row(), record.cell_id
        for name in GONE & row.keys():
            del row[name]
        if cell_id not in predicted:
            predicted[cell_id] = store.prediction(cell_id)
        yield (
            row
            | {k: v for k, v in predicted[cell_id].items() if k not in row}
            | {"sweep": store.name}
        )


def _unrun(store: Store, cell_id: str) -> dict[str, Any]:
    """Return the row of a cell that has no run: invalid, never started (see `record.json`), or waiting."""
    row = {"cell_id": cell_id, "sweep": store.name, "status": None}
    try:
        known = store.admitted(_known(store, cell_id))
    except ValueError as error:
        reason = f"What was frozen for it is not shown: {error}."
        known = {"status": str(Status.damaged), "reason": reason}
    return row | known | store.damaged_row(cell_id) | {"sweep": store.name}


def from_rows(
    rows: Iterable[dict[str, Any]], attributes: Mapping[str, Any] = MappingProxyType({})
) -> DataFrame:
    """Build a table column by column: equal texts are kept once, so 100,000 rows stay small.

    What a row lacks is NaN: a column without any value then holds numbers, as metrics do.
    """
    columns: dict[str, list[Any]] = {}
    seen: dict[str, str] = {}
    for count, row in enumerate(rows):
        for key, value in row.items():
            if key not in columns:
                columns[key] = [math.nan] * count
            columns[key].append(seen.setdefault(value, value) if type(value) is str else value)
        if len(row) < len(columns):
            for column in columns.values():
                column.extend([math.nan] * (count + 1 - len(column)))
    table = DataFrame(columns)
    if {"objective", "model"} <= {*table}:  # rows of the default one lack it
        lacks = table["objective"].isna() & table["model"].notna()
        table["objective"] = table["objective"].mask(lacks, plain_choice("objective"))
    table.attrs.update(attributes)
    return table


def _known(store: Store, cell_id: str) -> dict[str, Any]:
    """Return the row of a cell that never ran: its kept row, with its frozen choices if it has none."""
    row = {key: value for key, value in store.kept_row(cell_id).items() if key not in GONE}
    if store.damaged_row(cell_id):  # it was measured once, and is not any more
        measured = {*METRICS, *columns("comparison"), "blocks"}
        row = {key: value for key, value in row.items() if key not in measured}
    if "model" in row or not store.has(cell_id, "cell.yaml"):
        return row
    try:
        parts = store.frozen(cell_id)["cell"]
    except VitsweepError:  # it is damaged: the same command writes it anew
        return row
    groups = {k: v for k, v in parts.items() if isinstance(v, dict)}
    targets = {k: t if isinstance(t := v.get("target"), str) else None for k, v in groups.items()}
    choices = {k: title_of(v["name"], targets[k]) for k, v in groups.items() if "name" in v}
    values = {k: v for k, v in parts.items() if k not in groups}
    fields = {
        column: value
        for group, part in groups.items()
        for key, node in part.items()
        if key not in ("_target_", "name")
        for column, value in spread(f"{group}.{key}", node)
    }
    fields |= {k: str(v) for k, v in fields.items() if k.startswith("runtime.variables.")}
    numbers = {k: column_number(str(v)) for k, v in values.items() if type(v) is int}
    return choices | values | numbers | fields | _sizes(fields) | row


def _sizes(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that follow from the fields of a frozen cell; {} where they are no numbers."""
    names = (
        "resources.nodes resources.ranks_per_node mesh.replicate mesh.shard batch.images_per_step "
        "batch.resolution_px"
    ).split()
    found: list[Any] = [fields.get(name) for name in names]
    if any(type(value) is not int for value in found):
        return {}
    nodes, ranks, replicate, shard, images, side = found
    images *= replicate * shard if fields.get("batch.scope") == "per_replica" else 1
    world = {"nodes": nodes, "ranks_per_node": ranks, "world_size": nodes * ranks}
    return world | {"images_per_step": images, "resolution_px": side}


Source = str | Path | Store


def load(*sources: Source, rows: Literal["cells", "runs"] = "cells") -> DataFrame:
    """Read sweeps into one table, failed rows included.

    Args:
        sources: sweep folders, folders of sweep folders, `runs.parquet` or `cells.parquet` files; as
            many as wanted.
        rows: `cells` for one row per cell over its runs, `runs` for one row per run.

    Raises:
        VitsweepError: a source holds no records, is damaged, or holds cells where runs are wanted.
        OtherSchemaError: a record is of another schema than this version writes.
    """
    if not sources:
        raise VitsweepError("`load` needs a sweep folder or a parquet file.")
    tables = [table for source in sources for table in _read(source, rows)]
    return tidy(stacked(tables))


def stacked(tables: Sequence[DataFrame]) -> DataFrame:
    """Return the rows of several tables as one, which knows the metrics of the user's of all."""
    whole = tables[0] if len(tables) == 1 else pd.concat(tables, ignore_index=True)
    own = {k: v for table in tables for k, v in table.attrs.get("metrics", {}).items()}
    whole.attrs.update({"metrics": own} if own else {})
    return whole


def cells_of(store: Store) -> DataFrame:
    """Return one row per cell of a store, measured or not."""
    return cells_from(store, runs_of(store), store.baselines())


def cells_from(store: Store, runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return one row per cell of a store whose runs have been read."""
    unrun = DataFrame([_unrun(store, cell_id) for cell_id in store.cells_without_runs()])
    if len(unrun):
        unrun["baseline_cell_id"] = unrun["cell_id"].map(baselines)
    table = cells(runs, baselines, unrun, families_of(store))
    if len(runs) and not store.commands():
        alone = (table["status"] == Status.measured) & table["speedup"].isna()
        table["speedup_note"] = table["speedup_note"].mask(
            alone, say("no_speedup", why="`commands.jsonl` missing or empty")
        )
    if damaged := store.damaged_runs():
        table["damaged_runs"] = [damaged.get(cell_id, 0) for cell_id in table["cell_id"]]
    return table


def families_of(store: Store) -> list[frozenset[str]]:
    """Return the cells of each command of a sweep, oldest first, for the adjustment of claims.

    A command for a part of the cells of an earlier one (a retry, say) asks the same question again:
    it makes no smaller family.
    """
    found: list[frozenset[str]] = []
    for command in store.commands():
        asked = frozenset(map(str, command.get("cells", ())))
        whole = next((family for family in reversed(found) if asked <= family), asked)
        found = [*(family for family in found if family != whole), whole]
    return found


def _read(source: Source, rows: str) -> Iterator[DataFrame]:
    if isinstance(source, Store):
        yield runs_of(source) if rows == "runs" else cells_of(source)
    elif Path(source).is_file():
        yield _from_parquet(Path(source), rows)
    else:
        for store in stores_in(Path(source)):
            yield from _read(store, rows)


def stores_in(folder: Path) -> list[Store]:
    """Return the store of a sweep folder, or those of the sweep folders in it."""
    found = (
        [folder]
        if (folder / "cells").is_dir()
        else sorted(p.parent for p in folder.glob("*/cells"))
    )
    if not found:
        raise VitsweepError(
            f"`{folder}` holds no records: name a sweep folder (with `cells/` in it)."
        )
    return [Store(path) for path in found]


def _from_parquet(path: Path, rows: str) -> DataFrame:
    table = _checked(foreign_table(path), f"`{path}`").dropna(axis=1, how="all")
    if "cell_id" not in table:
        raise VitsweepError(f"`{path}` holds no records: name `runs.parquet` of a sweep folder.")
    if "run_id" not in table:
        if rows == "runs":
            raise VitsweepError(f"`{path}` holds cells, not runs: name `runs.parquet`.")
        return table
    store = Store(path.parent)
    return table if rows == "runs" else cells(table, store.baselines(), None, families_of(store))


def _checked(table: DataFrame, source: str) -> DataFrame:
    """Return a table of records; refuse one of another schema than this version's."""
    for version in table.get("schema_version", Series(dtype=float)).dropna().unique():
        try:
            check_schema(int(version))
        except OtherSchemaError as error:
            raise OtherSchemaError(f"{source}: {error}") from error
    return table
