"""State of the code in git."""

import subprocess
from pathlib import Path
from typing import Any


def git_state(folder: Path) -> dict[str, Any]:
    """Return commit and uncommitted changes of the code in `folder`; None where there is no git."""
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": bool(status) if status is not None else None}


def git_diff(folder: Path) -> str:
    """Return the uncommitted changes of tracked files."""
    return _git(folder, "diff", "HEAD") or ""


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
