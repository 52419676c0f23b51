"""CheckpointManager: what a training saves while it runs, and what a later attempt resumes from."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from vitsweep.collectives.primitives import from_first
from vitsweep.errors import VitsweepError, storage_error
from vitsweep.files import write_atomically
from vitsweep.training import checkpoint
from vitsweep.training.checkpoint import Position, first_of_all_ranks, saved_by
from vitsweep.training.checkpoint_files import (
    MEASUREMENT_FILE,
    TrainingInterrupted,
    checkpoints_in,
    other_course,
    read_json,
    whole_checkpoints,
)
from vitsweep.training.shards import plain_weights
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

# Requests to save or to stop a training, and the agreement of all ranks on the step before which.


class Decision(IntEnum):
    """What all ranks do before the next step; of several wishes the largest counts."""

    go_on = 0
    save = 1
    stop = 2


class StopConsensus:
    """Lets all ranks save, or stop, before the same step as soon as one rank wants to.

    Args:
        requested: set by a signal handler where this rank is requested to stop.
        device: of this rank. The wish is reduced in the device's stream, so no step waits for it: on
            a GPU each call returns the answer to the call before.
    """

    def __init__(self, requested: Event, device: torch.device) -> None:
        self._requested, self._device = requested, device
        self._pending: Callable[[], int] = lambda: 0

    def agreed(self, *, save_due: bool = False, at_once: bool = False) -> Decision:
        """Return what all ranks do now; every rank calls it before every step.

        Args:
            save_due: this rank wants a checkpoint.
            at_once: wait for the answer to this very call, as after the last step.
        """
        wish = Decision.stop if self._requested.is_set() else Decision(int(save_due))
        before, self._pending = self._pending, self._reduce(wish)
        found = before()
        if at_once or self._device.type == "cpu":
            found, self._pending = max(found, self._pending()), lambda: 0
        return Decision(found)

    def _reduce(self, wish: Decision) -> Callable[[], int]:
        """Start to reduce the wish over all ranks; return what reads the result."""
        flag = torch.full((1,), int(wish), dtype=torch.int32, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return lambda: int(flag)
        result = torch.empty_like(flag, device="cpu", pin_memory=True)
        result.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> int:
            copied.synchronize()
            return int(result)

        return read


@dataclass
class CheckpointManager:
    """Saves and resumes the measurement and the training of a run.

    Attributes:
        folder: of this attempt, which alone writes into it.
        earlier: folders of earlier attempts of the same run, newest first.
        stop: agreement of all ranks on when to save and to stop.
        trainings: folders of other runs of the same cell whose training was broken off, newest first:
            what they measured belongs to their blocks, but their training goes on here.
        resume_from: `task.resume_from`: checkpoints of another cell, used where there are none of this one.
        every_seconds: time between two checkpoints; None writes none while training goes on.
        resumed: what the training was resumed from, and which checkpoints could not be used; "" where
            it began at the beginning.
    """

    folder: Path
    earlier: tuple[Path, ...]
    stop: StopConsensus
    trainings: tuple[Path, ...] = ()
    resume_from: str | None = None
    every_seconds: float | None = None
    resumed: str = ""
    _saved_at: float = field(default_factory=time.monotonic)

    def load_measurement(self) -> dict[str, Any] | None:
        """Return what an earlier attempt measured before it trained; the same on every rank."""
        files = (folder / MEASUREMENT_FILE for folder in self.earlier)
        found = next((file for file in files if file.is_file()), None)
        return from_first(read_json(found) if found else None)

    def save_measurement(self, measured: dict[str, Any], world: World) -> None:
        """Save the measurement before training begins, so that no attempt measures again."""
        if world.rank == 0:
            write_atomically(self.folder / MEASUREMENT_FILE, json.dumps(measured), durable=True)

    def resume(self, trainer: Trainer) -> Position:
        """Load the newest checkpoint that can be used; return how far it had come.

        One that is damaged, or of another model, is passed over: the one before is used, and `resumed`
        says so.

        Raises:
            VitsweepError: a checkpoint that looked whole could not be read to its end, and there is no
                other that would replace what was loaded of it; or none of those that
                `task.resume_from` names could be used; or no checkpoint could hold what the optimizer does.
        """
        checkpoint.numbers(trainer)  # which refuses that before anything is trained
        folders = (*self.earlier, *self.trainings)
        own = [path for folder in folders for path in whole_checkpoints(folder)]
        others = checkpoints_in(self.resume_from) if self.resume_from else []
        # shared disks show a new file to some nodes earlier than to others: rank 0 decides
        own, others = (
            [Path(path) for path in from_first([str(path) for path in paths])]
            for paths in (own, others)
        )
        refused: list[str] = []
        half_loaded = False
        for path in (*own, *others):
            reason = other_course(trainer.cell, path) if path in others else ""
            if reason := first_of_all_ranks(reason):
                refused.append(reason)
                continue
            try:
                progress = checkpoint.load(trainer, path)
            except VitsweepError as error:  # nothing was loaded
                refused.append(str(error))
                continue
            except (Exception, CheckpointException) as error:  # the same on every rank
                half_loaded = True
                refused.append(f"`{path}` cannot be read ({type(error).__name__}).")
                continue
            writer = saved_by(path, trainer)
            self._note(f"after {progress.step} steps" + (f", {writer}" if writer else ""), refused)
            self._saved_at = time.monotonic()
            return progress
        if half_loaded:
            raise VitsweepError(
                f"{' '.join(refused)} Delete the folder to train from the beginning."
            )
        if self.resume_from:
            raise VitsweepError(
                f"`task.resume_from={self.resume_from}`: no checkpoint to go on from. {' '.join(refused)}"
            )
        if refused:
            self._note("at the beginning", refused)
        return Position()

    def decide(self, *, at_once: bool = False) -> Decision:
        """Return what all ranks do before the next step; every rank calls it.

        The first rank for which a checkpoint is due decides for all.
        """
        since, every = time.monotonic() - self._saved_at, self.every_seconds
        return self.stop.agreed(save_due=every is not None and since >= every, at_once=at_once)

    def save(self, trainer: Trainer, position: Position) -> None:
        """Write a checkpoint; every rank calls it.

        One that cannot be written (a full disk) is given up: training goes on without it.
        """
        try:
            checkpoint.save(trainer, position, self.folder)
        except (OSError, CheckpointException):  # the same on every rank
            print(f"A checkpoint could not be written to `{self.folder}`.")
        self._saved_at = time.monotonic()

    def save_and_stop(self, trainer: Trainer, position: Position) -> NoReturn:
        """Save a checkpoint and end the training.

        Raises:
            TrainingInterrupted: always.
        """
        checkpoint.save(trainer, position, self.folder)
        raise TrainingInterrupted(f"Training is saved after {position.step} steps.")

    def _note(self, where: str, refused: Sequence[str]) -> None:
        self.resumed = " ".join([f"Training went on {where}.", *refused])
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(self.resumed)


# Keeps the weights of a training in files that need no vitsweep to load.

FILE, AVERAGED_FILE = "weights.safetensors", "weights_averaged.safetensors"


@dataclass
class WeightKeeper:
    """Writes what `task.keep` names: the weights after the last epoch.

    The tensors have the names of the model before any technique; rank 0 writes them.

    Attributes:
        folder: of the run's files.
        keep: `task.keep`.
        reason: why there is no file, or "".
    """

    folder: Path
    keep: str
    reason: str = ""

    def facts(self) -> dict[str, str]:
        """Return where the weights are, from the sweep's folder, or why there are none, for the record."""
        if self.keep == "none":
            return {}
        if self.reason:
            return {"weights_reason": self.reason}
        return {"weights_file": str(Path(*self.folder.parts[-4:], FILE))}

    def finish(self, trainer: "Trainer", last: Mapping[str, float]) -> None:
        """Keep the weights where they are wanted; every rank calls it.

        Args:
            trainer: of the weights.
            last: the evaluation of these weights.
        """
        if self.keep == "none":
            return
        main = next(iter(trainer.cell.objective.scores), None)
        facts = {key: last[key] for key in ("epoch", main) if key}
        self._save(FILE, plain_weights(trainer, on_first=True), trainer.world.rank, facts)
        if trainer.average is not None:
            with trainer.averaged_weights():
                averaged = plain_weights(trainer, on_first=True)
            self._save(AVERAGED_FILE, averaged, trainer.world.rank, facts)

    def _save(self, name: str, weights: dict[str, Any], rank: int, facts: dict[str, float]) -> None:
        """Write a file; where the disk is full, the run's other results are worth more than it."""
        from safetensors.torch import save

        if rank:
            return
        about = {"format": "pt", "cell": self.folder.parent.parent.name}
        header = about | {key: str(value) for key, value in facts.items()}
        try:
            write_atomically(self.folder / name, save(weights, header), durable=True)
        except OSError as error:
            if not storage_error(error):
                raise
            self.reason = f"`{self.folder / name}` could not be written: {error.strerror}."
