"""Files that an interrupted run leaves for its next attempt; read without torch."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHECKPOINT_FOLDER = "checkpoint"
"""Inside the folder of an attempt, so that no attempt overwrites another's."""
MEASUREMENT_FILE = "measured.json"
"""Summary of the timed steps, written before training begins."""
INFO_FILE = "trained.json"
"""Written last: a folder that holds it holds a whole checkpoint."""


class TrainingInterrupted(Exception):
    """A stop was requested during training, and a checkpoint of all steps so far is on disk."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Numbers of a checkpoint beside its tensors; written when all tensors are on disk.

    Attributes:
        step: optimizer steps done.
        seconds: training time of these steps.
        world_size: ranks that saved it.
        mesh: degree of each mesh axis.
        scaler: state of the loss scaler, {} without one.
        groups: numbers that the optimizer keeps in its parameter groups.
    """

    step: int
    seconds: float
    world_size: int
    mesh: dict[str, int]
    scaler: dict[str, Any]
    groups: list[dict[str, float]]


def newest(folders: Iterable[Path], name: str) -> Path | None:
    """Return the first of the folders, given newest first, that holds a file of this name."""
    return next((folder for folder in folders if (folder / name).is_file()), None)


def read_info(folder: Path) -> CheckpointInfo:
    """Return the numbers of a checkpoint."""
    return CheckpointInfo(**read_json(folder / INFO_FILE))


def write_info(folder: Path, info: CheckpointInfo) -> None:
    """Write the numbers of a checkpoint, which makes it whole."""
    write_json_atomically(folder / INFO_FILE, asdict(info))


def read_json(path: Path) -> Any:
    """Return the document of a file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json_atomically(path: Path, document: Any) -> None:
    """Write JSON to a temporary name, flush it to disk, rename it: nobody ever reads a part of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as handle:
        json.dump(document, handle)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(path)
