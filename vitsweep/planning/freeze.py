"""Writing a sweep folder: every cell with its configuration and code, frozen before anything runs."""

import re
import secrets
import shlex
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitsweep import extras
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import captured
from vitsweep.execution.code_hash import PACKAGE_FOLDER, CellCode, package_hash
from vitsweep.execution.run_request import frozen_document
from vitsweep.files import cache_folder, make_folder, remove
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.rates.profile import device_name
from vitsweep.results.provenance import masked_word, require_trust
from vitsweep.results.record import Status, utc_now
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import (
    Definitions,
    definitions_of,
    foreign_functions,
    own_definitions,
)
from vitsweep.spec.cell_spec import flatten
from vitsweep.torch_compat import NEWEST, is_untried

# What is kept with every cell to repeat it: the typed command, the code and its versions.


PACKAGES = ("vitsweep", "torch", "hydra-core", "numpy", "torchao", "submitit")

_TYPED = tuple(sys.argv)  # Hydra is given other arguments later


def command_line() -> str:
    """Return the command as typed, without secrets, quoted so that it can be typed again."""
    program = Path(_TYPED[0])
    python = f"python {'-P ' * sys.flags.safe_path}-m vitsweep"
    typed = python if program.name == "__main__.py" else shlex.quote(program.name)
    return " ".join([typed, *(shlex.quote(masked_word(word)) for word in _TYPED[1:])])


UNTRIED = (
    f"is newer than {NEWEST}, the newest that vitsweep was tried with. Proofs compare each cell with "
    "reference training all the same, and records name this version; `constraints.txt` has one that works."
)


class UntriedTorchWarning(UserWarning):
    """The installed torch is newer than all that were tried."""


def code_state() -> dict[str, Any]:
    """Return `git_commit`, `git_dirty`, `git_diff` and the package versions that measure now.

    The git values are None, and the diff is empty, where the code is in no git repository.
    """
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    untried, versions = {}, {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    if is_untried():
        warnings.warn(f"torch {version('torch')} {UNTRIED}", UntriedTorchWarning, stacklevel=2)
        untried = {"torch_is_untried": True}
    return {
        **untried,
        "git_commit": commit,
        "git_dirty": bool(status) if status is not None else None,
        "git_diff": _git("diff", "HEAD") or "",
        "packages": versions,
    }


def code_folder(store: Store, *, snapshot: bool) -> Path:
    """Return the folder from which nodes of a cluster import vitsweep.

    Args:
        store: of the sweep.
        snapshot: copy the code next to the cells, once per state of the code, so that later edits do
            not reach jobs that are still waiting.
    """
    if not snapshot:
        return PACKAGE_FOLDER.parent
    copy = store.root.absolute() / "code" / package_hash()
    if copy.exists() and _files_in(copy / PACKAGE_FOLDER.name) != _files_in(PACKAGE_FOLDER):
        copy = copy.with_name(f"{copy.name}-{secrets.token_hex(8)}")  # somebody else's
    if not copy.exists():
        draft = copy.with_name(f".{copy.name}.draft")
        remove(draft)
        make_folder(copy.parent)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE_FOLDER, draft / PACKAGE_FOLDER.name, ignore=ignored)
        draft.rename(copy)
    return copy


def _files_in(folder: Path) -> dict[str, bytes | None]:
    """Return path -> content of the files below a folder; None for links, and bytecode left out."""
    return {
        str(path.relative_to(folder)): None if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or (path.is_file() and path.parent.name != "__pycache__")
    }


def _git(*words: str) -> str | None:
    try:
        done = captured(["git", "-C", str(PACKAGE_FOLDER), *words], timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def planned_store(device: str) -> Store:
    """Return where `plan` keeps what it predicts of cells on this machine, which need not exist.

    Args:
        device: `cpu` or `cuda`.
    """
    return Store(cache_folder() / re.sub(r"\W+", "-", f"predictions {device_name(device)}"))


def open_store(settings: SweepSettings) -> Store:
    """Make the sweep folder.

    Raises:
        VitsweepError: it cannot be written.
    """
    return Store(settings.path).create()


def freeze(
    store: Store,
    plan: SweepPlan,
    settings: SweepSettings,
    code: dict[str, Any],
    metrics: Definitions = MappingProxyType({}),
    **facts: Any,
) -> None:
    """Write every cell, the invalid ones with their reasons, and append the command.

    Uncommitted changes of the code are written once, and cells name the file.

    Args:
        store: of the sweep.
        plan: its cells.
        settings: of the sweep.
        code: state of the code.
        metrics: definitions of the user's columns that the command names.
        facts: further entries of the command's line.

    Raises:
        VitsweepError: somebody else's commands name functions of columns, and there is no `--trust`.
    """
    own = own_definitions(store)
    require_trust(store.root, foreign_functions(store, own | dict(metrics)))
    store.metrics = definitions_of(store.commands()) | dict(metrics)
    new = {column: node for column, node in store.metrics.items() if node != own.get(column)}
    changes = str(code.get("git_diff") or "")
    code = code | {"git_diff": store.keep("code", changes, ".diff") if changes else ""}
    codes: dict[str, CellCode] = {}
    for entry in plan.entries.values():
        document = frozen_document(entry.spec, entry.tree, entry.composed.overrides, code)
        store.freeze(entry.cell_id, document)
        codes[entry.code.hash] = entry.code
        if entry.reasons:
            row = {
                "cell_id": entry.cell_id,
                "sweep": store.name,
                "status": str(Status.invalid),
                "reason": " ".join(entry.reasons),
            }
            store.keep_row(row | flatten(entry.spec))
    for code_hash, cell_code in codes.items():
        store.keep_code(code_hash, cell_code.files)
    store.append_command(
        {
            "time": utc_now(),
            "command": command_line(),
            "question": settings.question,
            "limit": asdict(settings.limit),
            "search": settings.search,
            "replicate": settings.replicate,
            **extras.facts(plan, settings),
            "cells": [entry.cell_id for entry in plan.named],
            "baselines": plan.baselines,
            **({"metrics": new} if new else {}),
            **facts,
        }
    )
