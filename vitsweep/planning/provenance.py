"""What is kept with every cell to repeat it: the typed command, the code and its versions."""

import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitsweep.execution.code_hash import PACKAGE_FOLDER, package_hash
from vitsweep.results.store import Store

PACKAGES = ("vitsweep", "torch", "hydra-core", "numpy", "torchao", "submitit")

_TYPED = tuple(sys.argv)  # Hydra is given other arguments later


def command_line() -> str:
    """Return the command as typed, quoted so that it can be typed again."""
    program = Path(_TYPED[0])
    typed = "python -m vitsweep" if program.name == "__main__.py" else program.name
    return " ".join([typed, *map(shlex.quote, _TYPED[1:])])


def code_state() -> dict[str, Any]:
    """Return `git_commit`, `git_dirty`, `git_diff` and the package versions that measure now.

    The git values are None, and the diff is empty, where the code is in no git repository.
    """
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "git_commit": commit,
        "git_dirty": bool(status) if status is not None else None,
        "git_diff": _git("diff", "HEAD") or "",
        "packages": _package_versions(),
    }


def code_folder(store: Store, *, snapshot: bool) -> Path:
    """Return the folder from which nodes of a cluster import vitsweep.

    Args:
        store: of the sweep.
        snapshot: copy the code beside the cells, once per state of the code, so that later edits do
            not reach jobs that are still waiting.
    """
    if not snapshot:
        return PACKAGE_FOLDER.parent
    copy = store.root.absolute() / "code" / package_hash()
    if not copy.exists():
        draft = copy.with_name(f".{copy.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE_FOLDER, draft / PACKAGE_FOLDER.name, ignore=ignored)
        draft.rename(copy)
    return copy


def _package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE_FOLDER), *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
