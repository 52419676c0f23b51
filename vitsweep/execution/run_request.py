"""RunRequest: what a worker process is given; it reads everything else from the cell's folder."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitsweep.results.provenance import require_trust
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import own_definitions
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.free_text import free_text
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.measurement import MIN_BLOCKS


@dataclass(frozen=True)
class Run:
    """A run of a cell as part of a block, in one attempt or several.

    Attributes:
        block: name of its block.
        position: index in the block, from 0.
        cell_id: its cell.
        name: run id of the first attempt.
        purpose: why it runs, see `results.record.SCREENING`; "" for one of a grid's blocks.
    """

    block: str
    position: int
    cell_id: str
    name: str
    purpose: str = ""

    @classmethod
    def new(cls, block: str, position: int, cell_id: str, purpose: str = "") -> "Run":
        """Name a run that has not begun."""
        return cls(block, position, cell_id, f"{block}-{secrets.token_hex(3)}", purpose)

    def run_id(self, attempt: int) -> str:
        """Name an attempt, from 1: each has a record of its own, so none can overwrite another's."""
        return self.name if attempt == 1 else f"{self.name}-{attempt}"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One attempt at a run, as its ranks are given it.

    Attributes:
        sweep_folder: folder of the sweep.
        cell_id: the cell to run, from its `cell.yaml`.
        run_id: name of the run.
        block: name of its block.
        position: index of the run within its block, from 0.
        attempt: 1 for the first try.
        digest: SHA-256 of the settings of the cell that the command froze; a worker runs no others.
        metrics: definitions of the user's columns, see `results.user_metrics`.
        init_method: rendezvous of the ranks (`file://...` or `tcp://host:port`); "" before there is one.
        of_command: settings that belong to the command, not to the frozen cell (`CellSpec.of_command`);
            `supervise` fills them in.
        proved: how the cell was proved equal to reference training earlier, or "".
        proved_exactly: how a cell that differs in its precision alone was, by the same command, or "".
        environment: columns known to the launcher (git state, queue time); `supervise` adds the time
            and the code.
        earlier: folders of earlier attempts of the same run, newest first.
        trainings: folders of attempts of other runs of the cell that left checkpoints, newest first;
            `supervise` fills them in.
        instruments: whether phases, memory by kind and traffic are measured after the timed steps.
    """

    sweep_folder: Path
    cell_id: str
    run_id: str
    block: str
    position: int
    attempt: int = 1
    digest: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    init_method: str = ""
    of_command: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    proved: str = ""
    proved_exactly: str = ""
    environment: dict[str, object] = field(default_factory=dict)
    earlier: tuple[Path, ...] = ()
    trainings: tuple[Path, ...] = ()
    instruments: bool = True

    @property
    def name(self) -> str:
        """Name of the run, whatever the attempt."""
        return self.run_id.removesuffix(f"-{self.attempt}") if self.attempt > 1 else self.run_id

    @property
    def folder(self) -> Path:
        """Folder of the attempt's failure files, logs, trace and checkpoint."""
        return attempt_folder(self.sweep_folder / "cells" / self.cell_id, self.run_id, self.attempt)

    def record(self, **found: Any) -> RunRecord:
        """Return the run's record; `found` are the fields that are known when it has ended."""
        return RunRecord(
            run_id=self.run_id,
            sweep=self.sweep_folder.name,
            cell_id=self.cell_id,
            block=self.block,
            position=self.position,
            attempt=self.attempt,
            **found,
        )

    def plain(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        folders = {"earlier": self.earlier, "trainings": self.trainings}
        plain = {key: [*map(str, paths)] for key, paths in folders.items()}
        return asdict(self) | plain | {"sweep_folder": str(self.sweep_folder)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "RunRequest":
        """Read what `plain` wrote."""
        folders = {key: tuple(map(Path, plain[key])) for key in ("earlier", "trainings")}
        return cls(**{**plain, **folders, "sweep_folder": Path(plain["sweep_folder"])})


UNFINISHED = "-unfinished"
"""Ends the run id of a record that was written for a run because its own launcher or job died."""


def request_for(store: Store, run: Run, attempt: int = 1, **facts: Any) -> RunRequest:
    """Return the request of an attempt at a run.

    Args:
        store: of the sweep.
        run: the run.
        attempt: from 1.
        facts: other fields of RunRequest.
    """
    return RunRequest(
        sweep_folder=store.root.absolute(),
        cell_id=run.cell_id,
        run_id=run.run_id(attempt),
        block=run.block,
        position=run.position,
        attempt=attempt,
        digest=store.digest(run.cell_id),
        metrics=store.metrics or own_definitions(store),
        **facts,
    )


def attempt_folder(cell_folder: Path, run_id: str, attempt: int) -> Path:
    """Return the folder of an attempt: failure files, logs, trace and checkpoint."""
    return cell_folder / "attempts" / f"{run_id}.{attempt}"


def earlier_folders(store: Store, run: Run, attempt: int) -> tuple[Path, ...]:
    """Return the folders of the attempts at a run before one, newest first."""
    folder = store.cell(run.cell_id).absolute()
    return tuple(attempt_folder(folder, run.run_id(a), a) for a in range(attempt - 1, 0, -1))


def needs_warm_up(cells: Sequence[CellSpec]) -> bool:
    """Return whether the machine is warmed up before a block of these cells.

    The first run of a machine finds cold caches and a clock at rest. Where the block compares cells
    by intervals, that would slow whichever cell comes first. Not needed for a block of one cell or
    for fewer blocks than an interval needs; trainings get none, because none of their runs is short.
    """
    has_intervals = any(cell.measurement.blocks >= MIN_BLOCKS for cell in cells[:1])
    is_training = any(cell.task.epochs for cell in cells)
    return len(cells) > 1 and has_intervals and not is_training


# `cell.yaml`: written when a sweep is made, and all that a worker reads about its cell.


def frozen_document(
    cell: CellSpec, tree: Mapping[str, Any], overrides: tuple[str, ...], code: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of `cell.yaml`.

    Args:
        cell: the spec.
        tree: the resolved tree it was built from.
        overrides: what to type to get this cell.
        code: git commit, diff and package versions when the sweep was made.
    """
    parts = {name: tree[name] for name in vars(cell)}
    return {
        "cell_id": cell.cell_id,
        "overrides": list(overrides),
        "cell": parts,
        "code": dict(code),
    }


def read_cell(
    store: Store, cell_id: str, of_command: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> CellSpec:
    """Build the spec of a frozen cell.

    Args:
        store: of the sweep.
        cell_id: the cell.
        of_command: settings that belong to the command that runs the cell (`CellSpec.of_command`); those of
            the command that froze it where not given.

    Raises:
        VitsweepError: somebody else froze the cell, it holds free text, and there is no `--trust`.
    """
    document, is_own = store.frozen_by(cell_id)
    tree = document["cell"]
    if not is_own:
        require_trust(store.cell(cell_id), free_text(tree))
    given = {group: {**tree.get(group, {}), **of_group} for group, of_group in of_command.items()}
    return cell_from_tree({**tree, **given})
