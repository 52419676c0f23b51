"""What decides the course of a training, and from which checkpoints a cell may go on; without torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitsweep.spec.cell_spec import CellSpec, flatten, identity
from vitsweep.training.checkpoint_files import (
    CHECKPOINT_FOLDER,
    STEP_FOLDER,
    damage,
    read_info,
    whole_checkpoints,
)

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
    kept["optimizer.state"] = getattr(cell.optimizer, "state", None)  # its number format
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
        given: a checkpoint, with which the older ones beside it are meant too; or a folder of checkpoints, of
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
    if given is None:
        return
    if not cell.task.epochs:
        yield (
            f"`task.resume_from={given}` has no effect with `task={cell.task.name}`, which does not train: "
            "use `task=train`, or leave it out."
        )
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
