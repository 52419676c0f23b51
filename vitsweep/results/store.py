"""A sweep folder: the records under `cells/`, from which all tables and parquet files are made."""

import hashlib
import json
import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.files import (
    NAME,
    UnsafeFileError,
    append_line,
    guard,
    make_durable,
    make_folder,
    names_in,
    parent_of,
    read_bytes,
    remove,
    remove_empty,
    sync_folder,
    version_of,
    write_atomically,
    write_once,
)
from vitsweep.foreign import (
    MOST_COLUMNS,
    MOST_JSON_BYTES,
    MOST_ROW_SIZE,
    MOST_YAML_BYTES,
    foreign,
    parsed_json,
    parsed_lines,
    parsed_yaml,
    read_lines,
    size_of,
    yaml_text,
)
from vitsweep.results import pack
from vitsweep.results.lease import held, is_held, require_leases
from vitsweep.results.metrics import misfits
from vitsweep.results.provenance import (
    MARK,
    digest,
    is_own_text,
    marked,
    marked_text,
)
from vitsweep.results.record import OtherSchemaError, RunRecord, Status, is_command
from vitsweep.spec.from_yaml import cell_from_tree

NO_SECTION = (TypeError, KeyError, AttributeError, RecursionError)
"""What reading a part of a document raises that is of another type, or nested without end."""
MOST_KEPT_BYTES = 2**27
"""More records of a store are parsed anew each time: 20,000 of 6 KiB as text."""
MOST_COMMANDS = 10_000
_UNKNOWN = "unknown.json"
"""Stands for the records of a cell where a damaged pack does not say which there were."""


class DamagedRecordWarning(UserWarning):
    """A file of the store could not be read and is left out; the text names it."""


class Store:
    """One sweep folder.

    ```
    commands.jsonl                       who asked for which cells, and what their baseline is
    code/<hash>.diff                     uncommitted changes of the code that measures
    code/<hash>.json                     source files of a cell's code, each with its hash
    jobs/<array>/                        job arrays of a cluster (see `launchers.slurm.state`)
    cells/<cell_id>/cell.yaml            the frozen spec, written when the sweep is made
    cells/<cell_id>/attempts.jsonl       start and end of every attempt, with exit codes
    cells/<cell_id>/runs/<run_id>.json   one record per run
    cells/<cell_id>/record.json          why a cell has no run
    cells/pack.jsonl                     files of cells in one, see `results.pack`
    race.json                            how far a race came, see `extras.ROUNDS`
    runs.parquet samples.parquet cells.parquet cells.csv report/     made from the records
    ```

    Records that were read stay in memory, so that a command parses each file once: pass one Store
    on instead of opening another.

    Args:
        root: the folder.
        digests: cell id -> digest of what was frozen, for a process that runs cells for the command that
            froze them: another text is refused.

    Attributes:
        metrics: definitions of the user's columns that the command has asked for or accepted.
        refrozen: cells that `freeze` or `digest` wrote anew, since what was kept was none of this user's.
    """

    def __init__(self, root: Path, digests: Mapping[str, str] = MappingProxyType({})) -> None:
        self.root = root
        self.digests = dict(digests)
        self.metrics: Mapping[str, Any] = {}
        self.refrozen: set[str] = set()
        self._composed: dict[str, dict[str, Any]] = {}
        guard(root)
        self.cells = root / "cells"
        self._pack_file = self.cells / pack.FILE
        self._parsed: dict[str, tuple[tuple[int, ...], RunRecord]] = {}
        self._kept_bytes = 0
        self._columns: set[str] = set()
        self._damaged: dict[str, str] = {}
        self._commands: tuple[int, list[dict[str, Any]]] | None = None

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self.root.absolute().name

    def create(self) -> "Store":
        """Make the folder, and try there what keeps records whole, before anything is measured.

        Raises:
            VitsweepError: it cannot be written, or its file system cannot do that.
        """
        new = [p for p in (self.cells, *self.cells.absolute().parents) if not p.exists()]
        try:
            with parent_of(self.root, make=True) as (parent, name), suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            make_folder(self.cells)
            for folder in new:
                with parent_of(folder) as (parent, _):
                    sync_folder(parent)
            probe = self.root / f".probe-{os.getpid()}"
            write_once(probe, "")
            write_atomically(probe, "\n")
            append_line(probe, {})
            remove(probe)
        except UnsafeFileError:
            raise
        except OSError as error:
            raise VitsweepError(
                f"The results folder `{self.root}` cannot be written ({error.strerror}). "
                "Choose another with `sweep.folder=DIR`, or free it."
            ) from error
        return self

    def cell(self, cell_id: str) -> Path:
        """Return the folder of a cell.

        Raises:
            VitsweepError: the id is none, as another one's files may hold it.
        """
        if not isinstance(cell_id, str) or not NAME.fullmatch(cell_id):
            raise VitsweepError(f"`{self.root}`: {cell_id!r} is no cell id. Remove its files.")
        return self.cells / cell_id

    @contextmanager
    def lock(self, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the folder for one launcher at a time; `on_wait` is called if another has it."""
        with held(self.root / ".lock", on_wait):
            pack.forget(self._pack_file)  # who had the lock may just have packed
            yield

    def is_locked(self) -> bool:
        """Whether a command of this machine or of another one holds the folder."""
        return is_held(self.root / ".lock")

    def freeze(self, cell_id: str, document: dict[str, Any]) -> None:
        """Write what the worker will read; the settings that this user has frozen already stay as they are.

        A file that is damaged, of another user or of another cell is written anew with this user's mark: the
        command knows its cells, and runs nothing that a folder says instead. `overrides` are what was typed
        last. Whether a file with these overrides is right is checked where its cell runs, see `digest`.

        Raises:
            VitsweepError: another device is kept.
        """
        self.digests.pop(cell_id, None)
        self._composed[cell_id] = document
        head = {key: part for key, part in document.items() if key in ("cell_id", "overrides")}
        with suppress(OSError, ValueError):
            text = self.read(cell_id, "cell.yaml")
            if is_own_text(text) and text.startswith(f"{yaml_text(head)}cell:"):
                return
        if kept := self._kept(cell_id):
            document = kept | {"overrides": document["overrides"]}
        elif self.has(cell_id, "cell.yaml"):
            self.refrozen.add(cell_id)
        self._write(cell_id, document)

    def _write(self, cell_id: str, document: dict[str, Any]) -> None:
        text = marked_text(yaml_text(document))
        path, is_kept = self.cell(cell_id) / "cell.yaml", self.has_runs(cell_id)
        write_atomically(path, text, durable=is_kept)  # else `publish` waits for it
        self.digests[cell_id] = digest(document["cell"])

    def _kept(self, cell_id: str) -> dict[str, Any]:
        """Return what this user has frozen for a cell; {} where it is damaged, or another cell by its id."""
        try:
            document, is_own = self.frozen_by(cell_id)
            # which imports what it names
            cell = cell_from_tree(document["cell"]) if is_own else None
        except VitsweepError:
            return {}
        if cell is None or cell.cell_id != cell_id:
            return {}
        composed, device = self._composed.get(cell_id), cell.resources.device
        if composed and composed["cell"]["resources"]["device"] != device:
            raise VitsweepError(
                f"`{self.root}` has cell {cell_id} for `resources.device={device}`, and a sweep folder holds "
                "one kind of device: choose another folder with `sweep.name=NAME`."
            )
        return document

    def digest(self, cell_id: str) -> str:
        """Return the SHA-256 of the settings that this user has frozen for a cell, checked; "" of others.

        The cell that they make has the id of its folder, else they are written anew as the command composed
        them.

        Raises:
            VitsweepError: another device is kept.
        """
        if cell_id not in self.digests:
            if kept := self._kept(cell_id):
                self.digests[cell_id] = digest(kept["cell"])
            elif composed := self._composed.get(cell_id):
                self.refrozen.add(cell_id)
                self._write(cell_id, composed)
        return self.digests.get(cell_id, "")

    def is_own_cell(self, cell_id: str) -> bool:
        """Whether this user has frozen a cell, and nobody has changed it since."""
        return is_own_text(self.read(cell_id, "cell.yaml"))

    def frozen(self, cell_id: str) -> dict[str, Any]:
        """Return what was frozen for a cell, see `frozen_by`."""
        return self.frozen_by(cell_id)[0]

    def frozen_by(self, cell_id: str) -> tuple[dict[str, Any], bool]:
        """Return what was frozen for a cell, and whether by this user or this very command.

        Raises:
            VitsweepError: the file is missing or damaged, or not what the command froze that runs the cell.
        """
        path = self.cell(cell_id) / "cell.yaml"
        try:
            text = self.read(cell_id, path.name)
            document = parsed_yaml(text)
            overrides = document.setdefault("overrides", [])
            if not isinstance(document["cell"], dict) or not isinstance(overrides, list):
                raise TypeError("a section is missing")
            sections = [document["cell"], *document["cell"].values()]
            if any(type(key) is not str for part in sections if type(part) is dict for key in part):
                raise ValueError("a key is no text")
            if document.get("cell_id", cell_id) != cell_id:
                raise ValueError("it is of another cell")
        except (OSError, ValueError, *NO_SECTION) as error:
            why = error if type(error) is ValueError else type(error).__name__
            raise VitsweepError(
                f"`{path}` is missing or damaged ({why}): the command that made the cell "
                "writes it anew, typed once more."
            ) from error
        document.pop(MARK, None)
        expected = self.digests.get(cell_id)
        if expected is not None and digest(document["cell"]) != (expected or None):
            raise VitsweepError(
                f"`{path}` is not what the command froze that runs this cell: somebody has changed it since, "
                "and it is not run. The command, typed once more, writes it anew."
            )
        return dict(document), expected is not None or is_own_text(text)

    def content(self, cell_id: str, name: str) -> bytes:
        """Return a file of a cell, from its folder or else from the pack; of lines those of both.

        Raises:
            OSError: there is none, or it cannot be read.
        """
        loose, missing = b"", None
        most = MOST_YAML_BYTES if name.endswith(".yaml") else MOST_JSON_BYTES
        try:
            loose = read_bytes(self.cell(cell_id) / name, most)
        except FileNotFoundError as error:
            missing = error
        if not missing and not name.endswith(".jsonl"):
            return loose
        packed = self._pack()  # after the folder was read: files go from there to the pack
        if f"{cell_id}/{name}" in packed:
            kept = packed.text(f"{cell_id}/{name}").encode()
            return b"\n".join(dict.fromkeys((kept + b"\n" + loose).split(b"\n"))) if loose else kept
        if missing:
            raise missing
        return loose

    def read(self, cell_id: str, name: str) -> str:
        """Return a file of a cell as text, see `content`."""
        return self.content(cell_id, name).decode()

    def lines(self, cell_id: str, name: str) -> list[dict[str, Any]]:
        """Return the JSON lines of a file of a cell; lines cut in half and other damage are left out."""
        with suppress(FileNotFoundError, ValueError):
            return parsed_lines(self.content(cell_id, name))
        return []

    def has(self, cell_id: str, name: str) -> bool:
        """Whether there is a file of a cell, in its folder or in the pack."""
        return (self.cell(cell_id) / name).exists() or f"{cell_id}/{name}" in self._pack()

    def put_back(self, cell_id: str) -> None:
        """Write a packed `cell.yaml` next to the pack, which is too large for each rank to read."""
        name, packed = f"{cell_id}/cell.yaml", self._pack()
        if name in packed and not (self.cells / name).exists():
            with suppress(ValueError):
                write_atomically(self.cells / name, packed.text(name), durable=True)

    def _pack(self) -> pack.Pack:
        return pack.opened(self._pack_file)

    def keep(self, folder: str, text: str, suffix: str) -> str:
        """Write a text that many cells share, once; return its path in the sweep folder."""
        name = f"{folder}/{hashlib.sha256(text.encode()).hexdigest()[:12]}{suffix}"
        if not _has_content(self.root / name):
            write_atomically(self.root / name, text, durable=True)
        return name

    def keep_code(self, code_hash: str, files: Mapping[str, str]) -> None:
        """Write which source files make up a code, so that a later command can name what changed."""
        path = self.root / "code" / f"{code_hash}.json"
        if not _has_content(path):
            write_atomically(path, json.dumps(dict(files), indent=1), durable=True)

    def code_files(self, code_hash: str) -> dict[str, str]:
        """Return source file -> hash of a code; empty where it is not known."""
        path = self.root / "code" / f"{code_hash}.json"  # `code_hash` may be somebody else's
        try:
            files = foreign(path) if NAME.fullmatch(code_hash) else {}
        except (OSError, ValueError):
            return {}
        return files if isinstance(files, dict) else {}

    def save_run(self, run: RunRecord) -> Path:
        """Write a run's record; readers see nothing or the whole of it. The disk is not waited for."""
        path = self._run_file(run)
        write_atomically(path, run.to_json())
        return path

    def _run_file(self, run: RunRecord) -> Path:
        """Return where the record of a run belongs.

        Raises:
            VitsweepError: its id is none: another one's files would lead out of the folder.
        """
        if not NAME.fullmatch(run.run_id):
            raise VitsweepError(f"`{self.root}`: {run.run_id!r} is no run id. Remove its files.")
        return self.cell(run.cell_id) / "runs" / f"{run.run_id}.json"

    def publish(self, run: RunRecord) -> RunRecord:
        """Write the record of a run that has none yet; return the one that is on disk.

        The first record of a run is final: a rank that outlives its job publishes too late. The disk has it
        then, and what was frozen of its cell.
        """
        require_leases(self.root)
        path = self._run_file(run)
        if not self.has_runs(run.cell_id):
            make_folder(path.parent)
            with suppress(FileNotFoundError):
                make_durable(self.cell(run.cell_id) / "cell.yaml")
        is_packed = f"{run.cell_id}/runs/{path.name}" in self._pack()
        if is_packed or not write_once(path, run.to_json()):
            with suppress(ValueError):
                return self._parse(str(path))
            make_durable(self.save_run(run))  # the one on disk was damaged
        return run

    def keep_row(self, row: dict[str, Any]) -> None:
        """Write `record.json` of a cell without a run: its row of the table, which says why."""
        text, cell_id = f"{json.dumps(row, indent=1)}\n", row["cell_id"]
        with suppress(FileNotFoundError, ValueError):
            if self.read(cell_id, "record.json") == text:
                return
        write_atomically(self.cell(cell_id) / "record.json", text)

    def kept_row(self, cell_id: str) -> dict[str, Any]:
        """Return what `record.json` of a cell says; {} where there is none."""
        with suppress(OSError, ValueError):
            row: dict[str, Any] = parsed_json(self.read(cell_id, "record.json"))
            return self.admitted(row) if isinstance(row, dict) else {}
        return {}

    def adopt_prediction(self, cell_id: str, planned: "Store") -> None:
        """Keep what `planned` holds of a cell that has no run and no prediction here.

        With `VITSWEEP_PREDICT=never` in the environment nothing is kept.
        """
        if os.environ.get("VITSWEEP_PREDICT") == "never":
            return
        is_late = self.has_runs(cell_id) or self.is_predicted(cell_id)
        if planned.is_predicted(cell_id) and not is_late:
            with suppress(OSError, ValueError):  # it stops no command
                text = planned.read(cell_id, "prediction.json")
                write_atomically(self.cell(cell_id) / "prediction.json", text)

    def is_predicted(self, cell_id: str) -> bool:
        """Whether a prediction was made, or found to be impossible."""
        return self.has(cell_id, "prediction.json")

    def prediction(self, cell_id: str) -> dict[str, float | str | None]:
        """Return `predicted_<metric>` -> value of a cell; empty where nothing was predicted.

        `predicted_at` says when; of predictions without it nobody knows whether they came first.
        """
        with suppress(OSError, ValueError, TypeError, AttributeError):
            if self.is_predicted(cell_id):
                tree = parsed_json(self.read(cell_id, "prediction.json"))
                at = tree.pop("made_at", None)
                numbers = {
                    str(name): None if value is None else float(value)
                    for name, value in tree.items()
                    if name.startswith("predicted_")
                }
                return self.admitted(numbers | ({"predicted_at": str(at)} if at else {}))
        return {}

    def cell_ids(self) -> list[str]:
        """Return the ids of all cells, in order."""
        ids, packed = set(self.folders()), self._pack()
        ids.update(packed.runs)
        if not packed.is_whole:  # it was emptied, say: every cell that was asked for is missed
            ids.update(c for command in self.commands() for c in command.get("cells", ()))
            ids.update(self.baselines())
        return sorted(filter(NAME.fullmatch, filter(None, ids)))

    def has_runs(self, cell_id: str, prefix: str = "") -> bool:
        """Whether a cell has the record of a run whose id begins so."""
        return any(os.path.basename(p).startswith(prefix) for p in self._run_paths(cell_id))

    def cells_without_runs(self) -> Iterator[str]:
        """Yield the ids of the cells without a run record that `runs` could read, in order."""
        for cell_id in self.cell_ids():
            if all(path in self._damaged for path in self._run_paths(cell_id)):
                yield cell_id

    def damaged_runs(self) -> dict[str, int]:
        """Return cell -> how many of its run records `runs` could not read; without those of none."""
        return Counter(Path(path).parent.parent.name for path in self._damaged)

    def damaged_row(self, cell_id: str) -> dict[str, str]:
        """Return status and reason of a cell whose run records are all damaged; {} otherwise."""
        found = [path for path in self._run_paths(cell_id) if path in self._damaged]
        if not found:
            return {}
        reason = (
            f"None of its {len(found)} run records can be read (`{found[0]}`: "
            f"{self._damaged[found[0]]}). Restore them from a backup, or measure the cell again with "
            "the same command."
        )
        return {"status": str(Status.damaged), "reason": reason}

    def runs(self, cell_id: str = "*") -> Iterator[RunRecord]:
        """Yield every readable run record; damaged ones are named in a warning and left out.

        A file is parsed again only if it has changed since.

        Args:
            cell_id: read the records of this cell only.

        Raises:
            OtherSchemaError: a record is of another schema; its file is named.
            PermissionError: this user may not read one: to measure it again would be wrong.
        """
        for each in self.cell_ids() if cell_id == "*" else [cell_id]:
            for path in self._run_paths(each):
                try:
                    record = self._parse(path)
                    self._damaged.pop(path, None)
                    yield record
                except OtherSchemaError as error:
                    raise OtherSchemaError(f"{path}: {error}") from error
                except PermissionError:  # it is whole, and its owner alone may read it
                    raise
                except (ValueError, OSError) as error:
                    self._damaged[path] = str(error)
                    here = ""
                    with suppress(OSError):  # it was removed
                        here = os.path.join(os.getcwd(), "")
                    text = f"{path.removeprefix(here)} is damaged and left out ({error})"
                    warnings.warn(text, DamagedRecordWarning, stacklevel=2)

    def admitted(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row of a table; the columns of all rows together are as many as tables can have.

        Raises:
            ValueError: with its own they are more, or it holds more text than a person reads, or a value
                with which no table can compute.
        """
        if wrong := misfits(row):
            raise ValueError(f"`{wrong[0]}` is of another type")
        if len(columns := self._columns | row.keys()) > MOST_COLUMNS:
            raise ValueError(
                f"with it the sweep has {len(columns)} columns, and at most {MOST_COLUMNS} are read"
            )
        if (size := size_of(row)) > MOST_ROW_SIZE:
            raise ValueError(
                f"its row has {size} characters and entries, and at most {MOST_ROW_SIZE} are read"
            )
        self._columns = columns
        return row

    def _run_paths(self, cell_id: str) -> Sequence[str]:
        """Return where the records of a cell's runs are, or would be if they were not packed."""
        # os.scandir instead of glob: three times as fast where 100,000 files are read
        runs = os.path.join(self.cell(cell_id), "runs")
        if os.path.islink(runs):
            raise UnsafeFileError(f"`{runs}` is a link, which is not followed: remove it.")
        found = {p for p in names_in(runs) if p.endswith(".json") and not p.startswith(".")}
        packed = self._pack()  # after the folder, as in `content`
        listed = packed.runs.get(cell_id, ())
        found.update(listed)
        if not packed.is_whole and not listed and not self.cell(cell_id).exists():
            found.add(_UNKNOWN)
        return [os.path.join(runs, name) for name in sorted(found)]

    def folders(self) -> Iterator[str]:
        """Yield the names of the folders of cells; links and what no cell is called are named."""
        if os.path.islink(self.cells):
            raise UnsafeFileError(f"`{self.cells}` is a link, which is not followed: remove it.")
        for name in names_in(self.cells):
            path = os.path.join(self.cells, name)
            if name == pack.FILE:
                continue
            if os.path.islink(path) or not NAME.fullmatch(name):
                text = f"{path!r} is a link or no cell, and left out"
                warnings.warn(text, DamagedRecordWarning, stacklevel=2)
            else:
                yield name

    def _parse(self, path: str) -> RunRecord:
        """Read a record, from the pack or else from its own file, unless it was read and is as it was.

        Raises:
            ValueError: it is damaged, or of another run.
        """
        packed, name = self._pack(), path.removeprefix(f"{self.cells}{os.sep}")
        version: tuple[int, ...] = (0,)
        if name not in packed:
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                if name in self._pack():  # just now
                    return self._parse(path)
                raise ValueError(f"it is cut off or damaged in `{pack.FILE}`") from None
            version = (status.st_size, status.st_mtime_ns, status.st_ino)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_JSON_BYTES:
                raise UnsafeFileError("it is a link, not a regular file, or too large")
        known = self._parsed.get(path)
        if known is not None and known[0] == version:
            return known[1]
        if name in packed:
            size, record = packed.size(name), RunRecord.from_tree(packed.record(name))
        else:
            # in a folder that is known to be no link; many are read one after the other
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), encoding="utf-8", newline="") as handle:
                size, record = version[0], RunRecord.from_json(handle.read())
        if name != f"{record.cell_id}/runs/{record.run_id}.json":
            raise ValueError(f"it is of run `{record.run_id}` of cell `{record.cell_id}`")
        parts = record.spec, record.metrics, record.validity, record.environment
        if size > MOST_ROW_SIZE or not all(part.keys() <= self._columns for part in parts):
            self.admitted(record.row())
        if self._kept_bytes + size <= MOST_KEPT_BYTES:
            self._parsed[path] = (version, record)
            self._kept_bytes += size
        return record

    def pack(self, left: Collection[str] = ()) -> int:
        """Move the files of cells into `cells/pack.jsonl`, where all readers find them; return how many.

        A file is removed once the disk has its line. After a crash both are there, or the line is cut
        in half; then the next time completes it.

        Args:
            left: cells that stay as they are, since something writes their files.

        Raises:
            OSError: the pack cannot be written.
        """
        require_leases(self.root)
        place = self._pack_file
        before, cells = self._pack(), [c for c in self.folders() if c not in left]
        if not any(any(self._loose(cell_id)) for cell_id in cells):
            return 0
        moved, written = pack.write(place, before, map(self._loose, cells))
        require_leases(self.root)
        packed = self._pack()
        held = {name: packed.checksum(name) for name in moved}
        if None in held.values() or held | written != held:
            raise VitsweepError(f"`{place}` does not hold what was written: nothing was removed.")
        for name, version in moved.items():
            if version_of(self.cells / name) == version:
                remove(self.cells / name)
        for cell_id in cells:
            for folder in ("runs", "attempts", ""):
                remove_empty(self.cells / cell_id / folder)
        return len(moved)

    def _loose(self, cell_id: str) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        """Yield the files of a cell that a pack takes: name, version and content."""
        for path in map(Path, self._run_paths(cell_id)):
            version, name = version_of(path), f"{cell_id}/runs/{path.name}"
            if version and NAME.fullmatch(path.name):
                with suppress(OSError, ValueError, OtherSchemaError):
                    yield name, version, vars(self._parse(str(path)))
        for name in pack.OF_CELL:
            if version := version_of(self.cell(cell_id) / name):
                with suppress(OSError, ValueError):
                    yield f"{cell_id}/{name}", version, self.read(cell_id, name)

    def append_command(self, entry: dict[str, Any]) -> None:
        """Add a command to `commands.jsonl`."""
        require_leases(self.root)
        append_line(self.root / "commands.jsonl", marked(entry))
        make_durable(self.root / "commands.jsonl")

    def commands(self) -> list[dict[str, Any]]:
        """Return all commands, oldest first; a half-written last line is left out, and too large a file.

        The file is parsed again only if it has changed since.
        """
        path = self.root / "commands.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if self._commands is None or self._commands[0] != size:
            try:
                found = read_lines(path, MOST_COMMANDS)
            except VitsweepError as error:
                warnings.warn(f"{error} Baselines are unknown", DamagedRecordWarning, stacklevel=2)
                found = []
            if not size and path.exists():
                text = f"{path} is empty, as a power cut leaves a file: commands must be typed once more"
                warnings.warn(text, DamagedRecordWarning, stacklevel=2)
            self._commands = (size, [entry for entry in found if is_command(entry)])
        return list(self._commands[1])

    def baselines(self) -> dict[str, str | None]:
        """Return cell -> baseline cell (None where there is none), the latest command winning."""
        merged: dict[str, str | None] = {}
        for command in self.commands():
            merged |= command.get("baselines") or {}
        return merged


def _has_content(path: Path) -> bool:
    """Whether a file is there, and not empty as a power cut may leave it."""
    return path.exists() and path.stat().st_size > 0
