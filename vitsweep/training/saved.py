"""What a training leaves on disk when it is interrupted, as files; without torch."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "checkpoint"
"""Inside the folder of an attempt: no attempt can overwrite what another one saved."""
MEASURED, TRAINED = "measured.json", "trained.json"


class Interrupted(Exception):
    """The ranks were told to stop, and what they have done is saved."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How far a training has come; written when all tensors are on disk.

    Attributes:
        step: steps that are done.
        seconds: that they took.
        world_size: ranks that saved it.
        mesh: degrees of their mesh by axis.
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
    """Return the first of the folders, given newest first, that holds a file."""
    return next((folder for folder in folders if (folder / name).is_file()), None)


def read_trained(folder: Path) -> Trained:
    """Return how far a saved training has come."""
    return Trained(**read_whole(folder / TRAINED))


def write_trained(folder: Path, trained: Trained) -> None:
    """Say that what lies in the folder is whole."""
    write_whole(folder / TRAINED, asdict(trained))


def read_whole(path: Path) -> Any:
    """Return what `write_whole` wrote."""
    return json.loads(path.read_text())


def write_whole(path: Path, document: Any) -> None:
    """Write JSON so that nobody ever sees a part of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as handle:
        json.dump(document, handle)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(path)
