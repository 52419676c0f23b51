"""Short names of cells, and what a cell changes against its baseline."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import compress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series, factorize

from vitsweep.errors import BadValueError
from vitsweep.results.metrics import Kind, columns, known_metrics
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS, GROUPS_WITH_NAME
from vitsweep.spec.measurement import OF_COMMAND
from vitsweep.spec.menu import choices, content_of, plain_choice
from vitsweep.tables.formatting import BASELINE, plain, text_rows, value_label
from vitsweep.tables.valid_runs import checked_cells

# The columns of the record by kind, the spec columns that vary, and the order of known choices.


CHOICES = (*GROUPS, *GROUPS_WITH_NAME)

SET_FIELDS = ("resolution_px", *map("{}.".format, (*GROUPS, "model", "objective")))
"""Spec columns that a user sets, besides the choices of groups."""
CHOSEN_BY = {
    "world_size": ("resources",),
    "images_per_step": ("batch", "world_size"),
    "resolution_px": ("batch", "data"),
}
"""Size -> columns of which it may be a consequence; another one that varies is named."""
SIZES = ("images_per_step", "resolution_px")
"""Of a batch, whose name may say another one: 70 images of `blog_560`."""
FROM_DATA = ("model.frames", "model.in_channels", "model.num_classes")
"""Columns of those groups that are taken from the data, not set by a user."""
FROM_OTHERS = ("optimizer.eps", "sharding.gradient_as_bucket_view")
"""Columns of those groups that other groups fill where their choice says `auto`, see `resolve`."""
BOOKKEEPING = ("measurement", *(f"measurement.{name}" for name in OF_COMMAND))
"""Spec columns that change how precisely a cell is measured, not what is run."""


def spec_columns(table: DataFrame) -> list[str]:
    """Return the columns of the spec: choices first, then numbers, then fields."""
    named = [c for c in (*CHOICES, *columns("spec")) if c in table]
    return named + [str(c) for c in table if "." in str(c)]


def metric_columns(table: DataFrame) -> list[str]:
    """Return the measured columns in the order of `METRICS`, the user's own last."""
    return [c for c in known_metrics(table) if c in table]


def environment_columns(table: DataFrame) -> list[str]:
    """Return the columns that are neither head, spec, metric, prediction, comparison nor validity."""
    measured = {*known_metrics(table), *(c for c in table if str(c).startswith("predicted_"))}
    kinds: tuple[Kind, ...] = ("head", "run", "comparison", "validity")
    other = {*spec_columns(table), *measured, *(c for kind in kinds for c in columns(kind))}
    return [str(c) for c in table if c not in other]


Found = TypeVar("Found")


def _once(function: Callable[[DataFrame], Found]) -> Callable[[DataFrame], Found]:
    """Keep what a function finds of a table with the table; whatever is made from it is another table."""

    @wraps(function)
    def found(table: DataFrame) -> Found:
        known: dict[object, Found] = table.__dict__.setdefault("_found", {})
        return known[function] if function in known else known.setdefault(function, function(table))

    return found


@_once
def varying_columns(table: DataFrame) -> list[str]:
    """Return the spec columns that distinguish the cells: the choices that vary, then other columns.

    A field that its own choice says (`precision.master_weights` by `precision`) is left out, and
    so is a size determined by the columns before it (`num_tokens` by `resolution_px`). Fields of
    techniques and models, and the resolution, are kept also where they vary together (a learning
    rate and a weight decay) or with other choices (`layout.patch_embedding` and `precision`): the table
    cannot know which of them made the difference.
    """
    # `world_size` before `nodes` and `ranks_per_node`, so that it is the one that is kept
    ordered = sorted(spec_columns(table), key=lambda c: (c not in CHOICES, c != "world_size"))
    columns = [c for c in ordered if c not in BOOKKEEPING]
    choices = [c for c in columns if c in CHOICES and _varies(table[c])]
    if "world_size" in table and table["world_size"].notna().any():
        # of a damaged cell only choices are known
        table = table[table["world_size"].notna()]
    # of one that never ran, what was frozen: what it lacks is no value
    ran = table.get("status", Series("", table.index)).notna()
    rows = {c: (ran | table[c].notna()).to_numpy() for c in columns}
    varying = (c for c in columns if c not in CHOICES and _varies(table[c][rows[c]]))
    different = [*choices, *varying]
    codes = {c: factorize(v)[0] for c, v in comparable(table[different]).items()}
    kept = list(choices)
    one_group = np.zeros(len(table), dtype=np.int64)
    by_choices = by_kept = _grouped(one_group, *(codes[c] for c in choices))
    for column in different[len(choices) :]:
        was_set = column.startswith(SET_FIELDS) and column not in FROM_DATA
        groups, known = by_choices if was_set else by_kept, rows[column]
        is_kept = not _follows(groups[known], codes[column][known])
        own = CHOSEN_BY.get(column, (column.partition(".")[0],) * was_set)
        if own and column not in FROM_OTHERS and not is_kept:
            known = table[column].notna().to_numpy()  # a refused cell may lack the field
            said = _grouped(one_group[known], *(codes[c][known] for c in own if c in codes))
            is_kept = not _follows(said, codes[column][known]) or _is_typed(table, column)
        if is_kept:
            kept.append(column)
            by_kept = _grouped(by_kept, codes[column])
    return kept


def _is_typed(table: DataFrame, column: str) -> bool:
    """Return whether a field has another value than the YAML of its choice says; `auto` says none.

    The default batch has no size of its own: machines and sweeps give it one.
    """
    group, _, key = column.partition(".")
    rows = table[[group, column]].dropna() if {group, column} <= {*table} else DataFrame()
    rows = rows[rows["batch"] != plain_choice("batch")] if group == "batch" and len(rows) else rows
    return any(
        _is_another(group, choice, key, value) for choice, value in rows.itertuples(index=False)
    )


def _is_another(group: str, choice: str, key: str, value: object) -> bool:
    """Tell whether the YAML of a choice says another value."""
    said = content_of(group, choice).get(key, "auto") if choice in choices(group) else "auto"
    return said != "auto" and plain(said) != plain(value)


def _grouped(groups: NDArray[np.int64], *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Split numbered groups of rows by the codes of further columns; return the new numbers."""
    for codes in columns:
        _, groups = np.unique(groups * (codes.max() + 1) + codes, return_inverse=True)
    return groups


def _follows(groups: NDArray[np.int64], codes: NDArray[np.int64]) -> bool:
    """Return whether rows of the same group have the same code."""
    return bool(_grouped(groups, codes).max() + 1 == len(np.unique(groups)))


def comparable(table: DataFrame) -> DataFrame:
    """Return every value as text, missing ones as empty text, so that rows can be compared."""
    known = table.notna()
    texts = {
        c: [
            str(v) if is_known else ""
            for v, is_known in zip(table[c].tolist(), known[c], strict=True)
        ]
        for c in table
    }
    return DataFrame(texts, table.index, dtype=object)


def _varies(values: Series) -> bool:
    """Return whether a column has several values, compared as text since lists cannot be hashed.

    A missing field counts as a value (fp32 has no loss scale); a missing choice is unknown.
    """
    known = values.notna().tolist()
    missing_counts = values.name not in CHOICES and not all(known)
    return len(set(map(str, compress(values.tolist(), known)))) + missing_counts > 1


def in_menu_order(group: str, names: Iterable[str]) -> list[str]:
    """Return choices in the order of the menu; unknown ones follow, by name."""
    place = {name: i for i, name in enumerate(Status if group == "status" else choices(group))}
    return sorted(set(names), key=lambda name: (place.get(name, len(place)), name))


Row = dict[str, str]


def cell_names(cells: DataFrame) -> Series:
    """Return the name of each cell: what differs from its baseline, `O1 + adamw_foreach`, or `baseline`.

    Where baselines differ, what a cell shares with its own follows: `O1 · 2 ranks`. Without a baseline in
    the table a name has every varying column: `O1 · fsdp`. Cells that no column distinguishes, such as two
    classes of one choice, have their ids as well.
    """
    return name_parts(cells)["name"]


def series_names(cells: DataFrame, columns: Sequence[str]) -> Series:
    """Return the name of each cell by some spec columns; cells that these do not distinguish share one."""
    return _joined_parts(_parts(cells, columns))


def names_by_id(cells: DataFrame) -> dict[str, str]:
    """Return cell id -> name."""
    return dict(zip(cells["cell_id"], cell_names(cells), strict=True))


@_once
def name_parts(cells: DataFrame) -> DataFrame:
    """Return a cell's `name` (`cell_names`) and its two parts, `change` and `match`.

    The first is what differs from its baseline, `O1 + fsdp`; the second is the baseline's own setting
    where baselines differ, `4 ranks · 64 images`.
    """
    columns = varying_columns(cells)
    sizes = SIZES if "batch" in columns else ()
    other = [c for c in sizes if c not in columns and _is_typed(cells, f"batch.{c}")]
    names = _parts(cells, [*columns, *other])
    if "cell_id" in cells:
        ids = cells["cell_id"].astype(str)
        alike = ids.groupby([names["change"], names["match"]]).transform("nunique") > 1
        names["change"] = names["change"].mask(alike, names["change"] + " · " + ids)
    return names.assign(name=_joined_parts(names))


def _joined_parts(parts: DataFrame) -> Series:
    texts = [" · ".join(filter(None, row)) for row in parts.to_numpy().tolist()]
    return Series(texts, parts.index, dtype=object)


def _parts(cells: DataFrame, columns: Sequence[str]) -> DataFrame:
    named = [c for c in columns if c in cells]
    rows = text_rows(cells[named])
    ids = cells.get("cell_id", Series(None, cells.index, dtype=object))
    own = cells.get("baseline_cell_id", Series(None, cells.index, dtype=object))
    known = dict(zip(ids, rows, strict=True))
    bases = {base: known[base] for base in own if base in known}
    apart = [c for c in named if len({row[c] for row in bases.values()}) > 1]
    # by which a cell without a baseline, a refused one, is named
    shared: Row = next(iter(bases.values()), {})
    texts = []
    for row, base in zip(rows, own, strict=True):
        reference = bases.get(base, shared | {c: row[c] for c in apart})
        changed = [c for c in named if row[c] != reference.get(c)]
        if "batch" in changed:  # of another size than its name says, be that of the baseline
            sizes = {
                c for c in SIZES if c in named and _is_another("batch", row["batch"], c, row[c])
            }
            changed = [c for c in named if c in {*changed, *sizes}]
        if len(changed) > 1:  # the tokens follow
            changed = [c for c in changed if c != "num_tokens"]
        change, match = _joined(row, changed, " + "), _joined(reference, apart, " · ")
        is_named = bases and (change or base in bases)
        texts.append((change or BASELINE, match) if is_named else (_joined(row, named, " · "), ""))
    # each is its own: what distinguishes them is left
    if {change for change, _ in texts} == {BASELINE}:
        texts = [(match or change, "") for change, match in texts]
    unnamed = _alone(cells.iloc[0]) if len(cells) else ""
    texts = [(change or ("" if match else unnamed), match) for change, match in texts]
    return DataFrame(texts, cells.index, columns=["change", "match"], dtype=object)


def _alone(cell: Series) -> str:
    """Return the name of a cell that stands alone: its techniques but the default ones."""
    row = {c: plain(cell.get(c)) for c in ("model", *GROUPS)}
    return _joined(row, [c for c in GROUPS if row[c] != plain_choice(c)], " · ") or row["model"]


def baseline_settings(cells: DataFrame) -> str:
    """Return what `baseline` stands for, `fp32 · ddp`: the varying columns in which all baselines agree."""
    if "baseline_cell_id" not in cells or "cell_id" not in cells:
        return ""
    sizes = [c for c in SIZES if c in cells]  # instead of a name such as `base`
    told = ([c] if c != "batch" or not sizes else sizes for c in varying_columns(cells))
    columns = [*dict.fromkeys(c for some in told for c in some)]
    rows = text_rows(cells[columns][cells["cell_id"].isin(set(cells["baseline_cell_id"].dropna()))])
    same = [c for c in columns if len({row[c] for row in rows}) == 1]
    return _joined(rows[0], same, " · ") if rows else ""


def _joined(row: Row, columns: list[str], separator: str) -> str:
    return separator.join(name for c in columns if (name := value_label(c, row[c])))


Changes = frozenset[str]


def with_changes(cells: DataFrame) -> DataFrame:
    """Add `changes`: a set of the `column=value` settings in which a cell differs from its baseline.

    Only columns that `varying_columns` keeps are compared, so that a setting that is determined by another
    (`num_tokens` from `classifier`) is not counted twice. Cells without a baseline row in the
    table are left out.
    """
    cells = checked_cells(cells, "baseline_cell_id")
    columns = varying_columns(cells)
    rows = text_rows(cells[columns])
    known = dict(zip(cells["cell_id"], rows, strict=True))
    compared = cells["baseline_cell_id"].isin(list(known))
    pairs = zip(rows, cells["baseline_cell_id"], compared, strict=True)
    changes = [_changes(row, known[baseline]) for row, baseline, is_known in pairs if is_known]
    return cells[compared].assign(changes=Series(changes, cells.index[compared], dtype=object))


def named(changes: Changes) -> str:
    """Return changes as one label, `precision=O1 + sharding=fsdp`, or `baseline` if there are none."""
    order = {group: place for place, group in enumerate(CHOICES)}
    known = sorted(changes, key=lambda c: (order.get(c.partition("=")[0], len(order)), c))
    return " + ".join(known) or BASELINE


def short(label: str) -> str:
    """Return a label of `named` as names of cells say it: `O1 + fsdp`."""
    parts = (part.partition("=") for part in label.split(" + "))
    return " + ".join(value_label(key, value) if value else key for key, _, value in parts)


def _changes(row: Row, base: Row) -> Changes:
    return frozenset(f"{c}={value}" for c, value in row.items() if value != base[c])


# Which cell a user means.


def find_cell(cells: DataFrame, text: str) -> str:
    """Return the id of the cell that a text names: an id, a name as in tables, or settings.

    Of several cells that have the settings, the one counts that changes least besides them.

    Args:
        cells: one row per cell.
        text: such as `3f2a9c`, `O2 · fsdp`, `precision=O2`, `O2 fsdp`; the empty text for a baseline.

    Raises:
        BadValueError: it names no cell, or several.
    """
    found = cells_named(cells, text)
    columns = varying_columns(cells) or ["model"]
    known = dict(zip(cells["cell_id"], text_rows(cells[columns]), strict=True))
    bases = found.get("baseline_cell_id", found["cell_id"])
    changes = {
        str(cell): sum(known[cell].get(c) != known.get(base, {}).get(c) for c in columns)
        for cell, base in zip(found["cell_id"], bases, strict=True)
    }
    if len(least := [c for c, number in changes.items() if number == min(changes.values())]) == 1:
        return least[0]
    labels = cell_names(cells)
    listed = ", ".join(f"`{x}`" for x in (labels[found.index] if len(found) else labels).head(12))
    number = "several cells" if len(found) else "no cell"
    raise BadValueError(
        f"`{text}` names {number} of the sweep: type one of {listed}, or a cell id."
    )


def cells_named(cells: DataFrame, text: str) -> DataFrame:
    """Return the rows of the cells that a text may mean, see `find_cell`."""
    for hits in (cells["cell_id"].astype(str) == text, cell_names(cells) == text):
        if hits.any():
            return cells[hits]
    words = [word for word in text.replace("·", " ").replace("+", " ").split() if word]
    set_ = {word.partition("=")[0] for word in words if "=" in word}
    columns = {*(varying_columns(cells) or ["model"]), *CHOICES, *set_}
    rows = text_rows(cells[[c for c in cells if c in columns]])
    parted = [word.partition("=") for word in words]  # a setting, `precision=O2`, or a choice, `O2`
    return cells[
        [all(r.get(k) == v if is_set else k in r.values() for k, is_set, v in parted) for r in rows]
    ]
