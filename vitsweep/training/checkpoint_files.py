"""Checkpoints on disk, and from which of them a cell may go on; read without torch."""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vitsweep.files import open_safely, read_text, remove, write_atomically
from vitsweep.spec.cell_spec import CellSpec, flatten, identity

CHECKPOINT_FOLDER = "checkpoint"
"""Inside the folder of an attempt, so that no attempt overwrites another's."""
MEASUREMENT_FILE = "measured.json"
"""Summary of the timed steps, written before training begins."""
INFO_FILE = "trained.json"
"""Written last: a folder that holds it holds a whole checkpoint."""
STEP_FOLDER = "step-"
"""Begins the name of a checkpoint's own folder, which its optimizer steps end."""
KEPT_CHECKPOINTS = 2
"""Of a training: the one before the newest is used where that proves to be damaged."""

READ_BYTES = 2**22
"""Of a file at once, for its checksum."""


class TrainingInterrupted(Exception):
    """A stop was requested during training, and a checkpoint of all steps so far is on disk."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Numbers of a checkpoint besides its tensors; written when all tensors are on disk.

    Attributes:
        step: optimizer steps done.
        seconds: training time of these steps.
        world_size: ranks that saved it.
        mesh: degree of each mesh axis.
        sharding: choice of the group `sharding`.
        course: what the course of the training follows from (see `course`).
        scaler: state of the loss scaler, {} without one.
        groups: what a loop can set of the optimizer's parameter groups.
        curve: evaluations so far (see `training.epochs.evaluate`).
        files: sizes in bytes of the files with its tensors, by name.
        checksums: CRC-32 of the same files, by name; {} in checkpoints from before there were any.
    """

    step: int
    seconds: float
    world_size: int
    mesh: dict[str, int]
    sharding: str
    course: dict[str, Any]
    scaler: dict[str, Any]
    groups: list[dict[str, Any]]
    curve: list[dict[str, float]] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)


def step_folder(training: Path, step: int) -> Path:
    """Return the folder of a training's checkpoint after `step` optimizer steps."""
    return training / f"{STEP_FOLDER}{step:09d}"


def whole_checkpoints(training: Path) -> list[Path]:
    """Return the folders of a training's whole checkpoints, newest first."""
    found = [path.parent for path in training.glob(f"{STEP_FOLDER}*/{INFO_FILE}")]
    return sorted(found, reverse=True)


def drop_old_checkpoints(training: Path) -> None:
    """Remove all but the newest whole checkpoints of a training."""
    for folder in whole_checkpoints(training)[KEPT_CHECKPOINTS:]:
        remove(folder / INFO_FILE)  # first: what is left is none any more
        remove(folder)


def damage(folder: Path) -> str:
    """Return why a checkpoint cannot be read, as far as sizes of files show; "" where they are whole.

    It reads none of the tensors (see `altered_file`).
    """
    try:
        info = read_info(folder)
    except (OSError, ValueError) as error:
        return f"its {INFO_FILE} cannot be read ({error})"
    for name, size in info.files.items():
        path = folder / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size} bytes instead of {size}"
    return ""


def altered_file(folder: Path, part: int = 0, parts: int = 1) -> str:
    """Return which file of a checkpoint has other bytes than were written; "" where none has.

    It reads the files, which takes seconds per GB: several ranks share the work.

    Args:
        folder: of a checkpoint without `damage`.
        part: of the files, from 0, that is read here.
        parts: into which the files are divided.
    """
    for name, written in sorted(read_info(folder).checksums.items())[part::parts]:
        try:
            found = checksum(folder / name)
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
        if found != written:
            return f"its file {name} has other bytes than were written (checksum)"
    return ""


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with open(open_safely(path, os.O_RDONLY), "rb") as handle:
        while part := handle.read(READ_BYTES):
            found = zlib.crc32(part, found)
    return found


def read_info(folder: Path) -> CheckpointInfo:
    """Return the numbers of a checkpoint.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not what `write_info` writes.
    """
    document = read_json(folder / INFO_FILE)
    try:
        _info_type().validate_python(document)
        return CheckpointInfo(**document)  # validation makes floats of integers
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}") from None
    except TypeError as error:  # a setting that this version does not know
        raise ValueError(str(error)) from None


@cache
def _info_type() -> TypeAdapter[CheckpointInfo]:
    return TypeAdapter(CheckpointInfo)


def write_info(folder: Path, info: CheckpointInfo) -> None:
    """Write the numbers of a checkpoint, which makes it whole."""
    write_atomically(folder / INFO_FILE, json.dumps(asdict(info)), durable=True)


def read_json(path: Path) -> Any:
    """Return the document of a file."""
    return json.loads(read_text(path))


# What decides the course of a training, and from which checkpoints a cell may go on; without torch.

SPEED_ONLY = ("data.num_workers", "data.prefetch_batches")
"""Settings of data that change no image."""
SHOWN = 4
"""Differing settings that a refusal names."""


def course(cell: CellSpec) -> dict[str, Any]:
    """Return the settings that the course of a training follows from, as JSON takes them.

    Ranks, mesh, sharding, precision and implementations are none of them: they change how fast the same
    steps are taken, and their rounding.
    """
    flat = flatten(cell)
    kept = {
        key: value
        for key, value in flat.items()
        if key.partition(".")[0] in ("model", "data", "recipe") and key not in SPEED_ONLY
    }
    for key in ("task.epochs", "task.warmup_epochs", "task.label_smoothing", "seed"):
        kept[key] = flat[key]
    kept["batch.resolution_px"] = cell.batch.resolution_px
    kept["images_per_step"] = cell.images_per_step
    for group, technique in cell.techniques.items():
        if technique.part_of_training or technique.changes_model:
            kept[group] = identity(technique)
    optimizer = identity(cell.recipe.optimizer(cell).plain())
    kept |= {f"optimizer.{key}": value for key, value in optimizer.items() if key != "name"}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def other_course(cell: CellSpec, folder: Path) -> str:
    """Return why a checkpoint is of a training that took another course; "" where it is of the same.

    Args:
        cell: that would go on from it.
        folder: of the checkpoint; damaged ones are of none.
    """
    if reason := damage(folder):
        return f"`{folder}` is damaged: {reason}."
    here, there = course(cell), read_info(folder).course
    keys = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if not keys:
        return ""
    saved, asked = (
        ", ".join(f"`{key}={of.get(key)}`" for key in keys[:SHOWN]) for of in (there, here)
    )
    return (
        f"`{folder}` is of a training with {saved}, and this one has {asked}: a training goes on with the "
        "same model, data, recipe and images per step; ranks, mesh, sharding and precision may differ."
    )


def checkpoints_in(given: str) -> list[Path]:
    """Return the whole checkpoints that `task.resume_from` names, newest first.

    Args:
        given: a checkpoint, which stands for the older ones next to it too; or a folder of checkpoints, of
            an attempt, or of a cell.
    """
    root = Path(given).expanduser()
    if root.name.startswith(STEP_FOLDER):
        return [path for path in whole_checkpoints(root.parent) if path.name <= root.name]
    trainings = [root, root / CHECKPOINT_FOLDER, *root.glob(f"attempts/*/{CHECKPOINT_FOLDER}")]
    found = [path for training in trainings for path in whole_checkpoints(training)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def resume_conflicts(cell: CellSpec) -> Iterator[str]:
    """Yield why a cell cannot go on from what `task.resume_from` names."""
    given = cell.task.resume_from
    # without training the task says that it has no effect
    if given is None or not cell.task.epochs:
        return
    found = checkpoints_in(given)
    if not found:
        yield (
            f"`task.resume_from={given}` holds no checkpoint: give the folder of one "
            f"(`.../{CHECKPOINT_FOLDER}/{STEP_FOLDER}000000100`), or of a cell "
            "(`results/SWEEP/cells/ID`) whose training was interrupted."
        )
        return
    readable = [path for path in found if not damage(path)]
    reasons = [other_course(cell, path) for path in readable]
    if readable and all(reasons):
        yield f"`task.resume_from`: {reasons[0]}"
    if not readable:
        yield (
            f"`task.resume_from={given}`: `{found[0]}` is damaged ({damage(found[0])}), and there is no "
            "other: delete it and train from the beginning."
        )
