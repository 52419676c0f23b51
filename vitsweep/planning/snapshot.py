"""A copy of the code beside the cells, so that edits do not reach jobs that are still waiting."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vitsweep
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.results.store import Store

PACKAGE = Path(vitsweep.__file__).parent


def code_folder(store: Store, settings: SweepSettings, code: Mapping[str, Any]) -> Path:
    """Return the folder from which nodes import vitsweep.

    Args:
        store: of the sweep.
        settings: of the sweep; with `snapshot_code` the folder is a copy, made once per state
            of the code.
        code: git state and changes.
    """
    if not settings.snapshot_code:
        return PACKAGE.parent
    state = f"{code['git_commit']} {code['git_diff']}".encode()
    copy = store.root.absolute() / "code" / hashlib.sha256(state).hexdigest()[:12]
    if not copy.exists():
        draft = copy.with_name(f".{copy.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(PACKAGE, draft / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        draft.rename(copy)
    return copy
