"""A bundle checked: every table, figure and claim made anew from its records, and nothing in it run."""

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.extras.bundle.claims import Claim, claims_of, read_claims
from vitsweep.extras.bundle.pack import (
    HIDDEN,
    checksum_faults,
    figures_of,
    files_of,
    packages,
    read_document,
)
from vitsweep.files import open_safely, read_bytes, read_text
from vitsweep.foreign import (
    MOST_TABLE_VALUES,
    MOST_YAML_BYTES,
    OF_SWEEP,
    foreign_table,
    parsed_json,
    read_lines,
    table_size,
)
from vitsweep.report.views import collect
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import MOST_COMMANDS, DamagedRecordWarning, Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.free_text import free_text
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.tables.formatting import count, missing
from vitsweep.tables.sweep_tables import SweepTables

TOLERANCE = 1e-9
"""Relative: other versions of numpy and scipy round the last digits of an interval differently."""
ROUNDING_MS = 5e-5
"""Records keep the times of steps in tenths of a microsecond."""
MOST_NAMED = 5


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        store: the sweep folder of the bundle.
        claims: that are made.
        passed: what was made anew and is equal, in sentences.
        faults: what is not as its records say.
        unsure: what could not be compared here.
    """

    store: Store
    claims: tuple[Claim, ...]
    passed: tuple[str, ...]
    faults: tuple[str, ...]
    unsure: tuple[str, ...]


def check(root: Path, drawn_by: str) -> Checked:
    """Check an extracted bundle; its views are written anew, so the folder is one that nobody else uses.

    Args:
        root: the sweep folder, as `archive.extract` returns it.
        drawn_by: hash of the code that draws and counts here; figures of other code are not compared.

    Raises:
        VitsweepError: the bundle has no claims that can be read.
        OtherSchemaError: a record is of another schema.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRecordWarning)  # a damaged record is a fault
        return _checked(Store(root), read_document(root), drawn_by)


def _checked(store: Store, document: dict[str, object], drawn_by: str) -> Checked:
    root, passed, faults = store.root, [], checksum_faults(store.root)
    if not faults:
        passed.append(f"{count(len(files_of(root)) - 1, 'file')} with the listed checksums")
    records = list(store.runs())
    contradicting = [*_record_faults(store, records)]
    views = {n: root.with_name(f"said-{n}") for n in files_of(root) if _is_view(n)}
    for name, kept in views.items():
        (root / name).replace(kept)
    tables = collect(store)
    wrong = [*contradicting, *_view_faults(root, views)]
    if not wrong:
        passed += [
            f"{count(len(records), 'record')}: throughput follows from the times of the steps",
            f"{len(views)} tables: equal to those made from the records",
        ]
    claims, of_claims = _claims(document, tables)
    if not of_claims:
        passed.append(f"{count(len(claims), 'claim')} equal to those made from the records")
    figures, of_figures, unsure = _figures(root, tables, document, drawn_by)
    passed += [f"{count(figures, 'figure')} drawn anew and equal"] * bool(figures)
    faults += [*wrong, *of_claims, *of_figures]
    return Checked(store, tuple(claims), tuple(passed), tuple(faults), tuple(unsure))


def _record_faults(store: Store, records: list[RunRecord]) -> Iterator[str]:
    """Yield what contradicts itself within the records, the frozen cells, and the code that they name."""
    for cell_id, number in store.damaged_runs().items():
        yield f"{count(number, 'record')} of cell {cell_id} cannot be read, or its checksum is another."
    for record in records:
        if (said := record.metrics.get("images_per_second")) and record.status == Status.measured:
            low, high = _throughput(record)
            if not low <= said <= high:
                yield (
                    f"Run {record.run_id} says {said:.6g} images/s, and its steps say {(low + high) / 2:.6g}."
                )
    specs = {r.cell_id: r.spec for r in reversed(records)}  # of a cell's first run
    kept = {(r.cell_id, r.run_id) for r in records}
    for cell_id in store.cell_ids():
        for line in store.lines(cell_id, "attempts.jsonl"):
            codes, run_id = line.get("exit_codes"), line.get("run_id")
            if codes and not any(codes) and (cell_id, run_id) not in kept:
                yield f"Run {run_id} of cell {cell_id} ended well, and its record is missing."
        if not store.has(cell_id, "cell.yaml"):
            continue  # it cannot run again, nor be checked
        try:
            tree = store.frozen(cell_id)["cell"]
        except (VitsweepError, KeyError, TypeError):
            yield f"`cell.yaml` of cell {cell_id} cannot be read."
            continue
        with suppress(VitsweepError):  # a setting that this version does not know
            yield from _cell_faults(cell_id, tree, specs.get(cell_id, {}))
    yield from _command_faults(store.root / "commands.jsonl")
    for path in sorted((store.root / "code").glob("*.diff")):
        if sha256(read_bytes(path)).hexdigest()[:12] != path.stem:
            yield f"`code/{path.name}` is not the diff that its cells name."


def _throughput(record: RunRecord) -> tuple[float, float]:
    """Return between which images/s the times of a run's steps put it (`measure.summarize`)."""
    samples, first = record.samples, int(record.samples.get("warm_up_steps", 0))
    skipped = samples.get("skipped", [])
    of_ranks = [
        [t for t, skip in list(zip_longest(rank, skipped))[first:] if t is not None and not skip]
        for rank in samples.get("step_time_ms") or []
    ]
    if not any(of_ranks):
        return -math.inf, math.inf  # only the instruments' times were kept
    step_ms = max(sum(times) / len(times) for times in of_ranks if times)
    images = 1e3 * float(record.spec.get("images_per_step") or 0)
    slack = ROUNDING_MS + TOLERANCE * step_ms
    return images / (step_ms + slack), images / max(step_ms - slack, 1e-12)


def _command_faults(path: Path) -> Iterator[str]:
    """Yield which lines of the commands are no JSON."""
    try:
        read_lines(path, MOST_COMMANDS)
        lines = read_bytes(path).splitlines() if path.exists() else []
    except VitsweepError as error:
        yield str(error)
        return
    for place, line in enumerate(lines, start=1):
        try:
            parsed_json(line.decode(), OF_SWEEP)
        except ValueError:
            yield f"Line {place} of `commands.jsonl` cannot be read."


def _cell_faults(cell_id: str, tree: Any, said: dict[str, Any]) -> Iterator[str]:
    """Yield what of a frozen cell is not what its runs were made with.

    A cell with free text is not built.
    """
    if [*free_text(tree)] or HIDDEN in str(tree):
        return
    cell = cell_from_tree(tree)
    frozen = json.loads(json.dumps(flatten(cell)))
    # those are of the command
    settings = [key for key in said if not key.startswith("measurement")]
    wrong = [
        k for k in settings if k in frozen and not _same(said[k], frozen[k]) and said[k] != "***"
    ]
    if wrong:
        yield f"The runs of cell {cell_id} have other settings than its `cell.yaml`: {_some(wrong)}."
    elif cell.cell_id != cell_id:
        yield f"The settings in `cell.yaml` of cell {cell_id} are those of cell {cell.cell_id}."


def _is_view(name: str) -> bool:
    return name.endswith((".parquet", ".csv"))


def _view_faults(root: Path, views: dict[str, Path]) -> Iterator[str]:
    for name, kept in views.items():
        try:
            differing = _differing_table if name.endswith(".parquet") else _differing_text
            wrong = [*differing(kept, root / name)]
        except (OSError, ValueError) as error:
            yield f"`{name}` cannot be read ({type(error).__name__})."
            continue
        if wrong:
            yield f"`{name}` is not what the records say: {_some(wrong)}."


def _differing_table(kept: Path, made: Path) -> Iterator[str]:
    """Yield the columns of a bundle's table that are not the recomputed ones, as many at a time as fit."""
    (rows, names), (made_rows, others) = table_size(kept), table_size(made)
    if rows != made_rows:
        yield f"{rows} rows"
        return
    at_once = max(MOST_TABLE_VALUES // max(rows, 1), 1)
    yield from (name for name in names if name not in others)
    both = [name for name in names if name in others]
    for first in range(0, len(both), at_once):
        part = both[first : first + at_once]
        yield from _differing(foreign_table(kept, part), foreign_table(made, part))


def _differing_text(kept: Path, made: Path) -> Iterator[str]:
    if kept.stat().st_size > 2 * made.stat().st_size + 2**16:
        yield f"{kept.stat().st_size} bytes"
        return
    yield from _differing(
        *(pd.read_csv(p, dtype=object, keep_default_na=False) for p in (kept, made))
    )


def _differing(kept: DataFrame, made: DataFrame) -> Iterator[str]:
    """Yield the columns of a bundle's table that are not the recomputed ones; new columns do not count."""
    for column in kept:
        same = column in made and len(kept) == len(made)
        if not same or not all(map(_same, kept[column].tolist(), made[column].tolist())):
            yield str(column)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal, numbers and their texts but for rounding."""
    if str(a) == str(b) or (missing(a) and missing(b)):
        return True
    with suppress(TypeError, ValueError):
        return math.isclose(float(a), float(b), rel_tol=TOLERANCE)
    return False


def _claims(document: dict[str, object], tables: SweepTables) -> tuple[list[Claim], list[str]]:
    """Return the claims of a bundle, and which of them the records do not make."""
    try:
        said = read_claims(document.get("claims"))
    except ValueError as error:
        raise VitsweepError(f"The claims of the bundle cannot be read: {error}.") from error
    made = {(c.cell_id, c.device): c for c in claims_of(tables.cells)}
    faults = []
    for claim in said:
        own = made.pop((claim.cell_id, claim.device), None)
        differing = [
            key for key, value in vars(claim).items()
            if key != "margin" and (own is None or not _same(value, getattr(own, key)))
        ]  # fmt: skip
        if own is None:
            faults.append(f"The claim on {claim.cell!r} is made by no record.")
        elif differing:
            faults.append(
                f"The claim on {claim.cell!r} ({claim.ratio:.4g}) is not what the records say "
                f"({own.ratio:.4g} [{own.low:.4g}, {own.high:.4g}]): {_some(differing)}."
            )
    faults += [f"The claim on {claim.cell!r} was left out." for claim in made.values()]
    return said, faults


def _figures(
    root: Path, tables: SweepTables, document: dict[str, object], drawn_by: str
) -> tuple[int, list[str], list[str]]:
    """Return how many figures are equal to those drawn here, which are not, and which may not be."""
    made = figures_of(tables)
    kept = {name for name in files_of(root) if name.startswith("figures/")}
    wrong = sorted(n for n in made.keys() | kept if not _is_text(root / n, made.get(n, "")))
    equal = len(kept - set(wrong))
    if not wrong:
        return equal, [], []
    here = f"{drawn_by} matplotlib {version('matplotlib')}"
    text = f"{count(len(wrong), 'figure')} not equal to those that the records give here: {_some(wrong)}"
    if document.get("drawn_by") == here:
        return equal, [f"{text}."], []
    return (
        equal,
        [],
        [f"{text}. They were drawn by other versions: `vitsweep report` draws them anew."],
    )


def _is_text(path: Path, text: str) -> bool:
    content = text.encode()
    return path.exists() and path.stat().st_size == len(content) and read_bytes(path) == content


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_NAMED]) + more


# What another laboratory has to know before it runs the cells.


def code_lines(store: Store, changed: dict[str, list[str] | None]) -> list[str]:
    """Return what a sweep says of its code: commits, diffs, and how its files differ from those here.

    Args:
        store: the sweep folder of the bundle.
        changed: code hash -> source files that are others here; None where they are not listed.
    """
    lines: dict[str, None] = {}
    for cell_id in store.cell_ids():
        with suppress(VitsweepError, OSError, AttributeError, TypeError):
            code = store.frozen(cell_id).get("code") or {}
            diff = str(code.get("git_diff") or "")
            dirty = ", with uncommitted changes" if code.get("git_dirty") else ""
            lines[f"commit {str(code.get('git_commit') or 'unknown')[:12]}{dirty}"] = None
            if re.fullmatch(r"code/\w+\.diff", diff):
                lines[f"{diff}: {_diff_files(store.root / diff)}"] = None
    for code_hash, files in changed.items():
        same = "its source files are those here" if not files else f"other here: {_some(files)}"
        unknown = "its source files are not listed"
        lines[f"code {code_hash}: {unknown if files is None else same}"] = None
    return [*lines]


def _diff_files(path: Path) -> str:
    names, marks = dict[str, None](), Counter[str]()
    with open(open_safely(path, os.O_RDONLY), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if found := re.match(r"diff --git a/(\S+)", line[:1000]):
                names[found[1]] = None
            if not line.startswith(("+++", "---")):
                marks[line[:1]] += 1
    return f"{_some([*names])} (+{marks['+']} -{marks['-']} lines)"


def package_lines(root: Path) -> list[str]:
    """Return which packages have another version here; nothing is installed."""
    theirs, here = (
        dict(line.split("==", 1) for line in text.splitlines() if "==" in line)
        for text in (read_text(root / "packages.txt", MOST_YAML_BYTES), packages())
    )
    return [
        f"{name} {theirs[name]}, here {here.get(name, 'not installed')}"
        for name in sorted(theirs)
        if theirs[name] != here.get(name)
    ]


def text_of_cells(store: Store, cells: set[str]) -> list[str]:
    """Return the free text of cells."""
    return [text for cell in sorted(cells) for text in free_text(store.frozen(cell)["cell"])]
