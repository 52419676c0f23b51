"""Traces kept on disk between commands (no torch)."""

import gzip
import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitsweep.cache_files import cache_folder, write_cache_file
from vitsweep.execution.code_hash import Sources, folder_hash
from vitsweep.predict.step_trace import StepTrace
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.identity import identity

NOT_TRACED = ("seed", "data", "measurement", "recipe")
"""Parts of a cell that change nothing in its step."""
VALUES = ("learning_rate", "weight_decay", "beta1", "beta2", "eps", "momentum")
"""Fields of an optimizer by which no operator differs."""


def traces_folder() -> Path:
    """Return the folder of the traces; it need not exist."""
    return cache_folder() / "traces"


class TraceCache:
    """One compressed JSON file for each distinct shape of a step.

    Safe under concurrent use. A damaged file counts as missing and is replaced. Without a folder that
    can be written nothing is kept.

    Args:
        folder: of the files.
        sources: from which the code of cells is read.
    """

    def __init__(self, folder: Path | None = None, sources: Sources | None = None) -> None:
        self._folder = folder or traces_folder()
        self._sources = sources or Sources()

    def key(self, cell: CellSpec) -> str:
        """Hash what a trace depends on: shapes and choices of the cell, its code, torch."""
        shape: dict[str, Any] = {
            part: value for part, value in identity(cell).items() if part not in NOT_TRACED
        }
        shape["optimizer"] = {
            name: value for name, value in shape["optimizer"].items() if name not in VALUES
        }
        resources = cell.resources
        shape["resources"] = [resources.device, resources.nodes, resources.ranks_per_node]
        shape["task"] = cell.task.label_smoothing > 0
        shape["code"] = [self._sources.of(cell).hash, _own_code(), version("torch")]
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:24]

    def get(self, key: str) -> StepTrace | None:
        """Return a trace, or None where there is none that can be read."""
        try:
            tree = json.loads(gzip.decompress(self._path(key).read_bytes()))
            return StepTrace.from_json(tree)
        except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError):
            return None  # missing or damaged

    def put(self, key: str, trace: StepTrace) -> None:
        """Keep a trace."""
        write_cache_file(
            self._path(key), gzip.compress(json.dumps(trace.to_json()).encode(), mtime=0)
        )

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json.gz"


@cache
def _own_code() -> str:
    return folder_hash("predict")
