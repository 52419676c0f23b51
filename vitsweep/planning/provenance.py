"""Which code measures: commit, uncommitted changes, package versions."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitsweep.planning.git import git_diff, git_state

PACKAGES = ("vitsweep", "torch", "hydra-core", "numpy", "torchao", "submitit")


def code_state() -> dict[str, Any]:
    """Return what is frozen with every cell."""
    folder = Path(__file__).parent
    return git_state(folder) | {"git_diff": git_diff(folder), "packages": package_versions()}


def package_versions() -> dict[str, str]:
    """Return the versions of what can change a number."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
