"""CheckpointManager: what an interrupted attempt of a run saves, and what the next one resumes from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from vitsweep.training import checkpoint
from vitsweep.training.checkpoint_files import (
    INFO_FILE,
    MEASUREMENT_FILE,
    TrainingInterrupted,
    newest,
    read_json,
    write_json_atomically,
)
from vitsweep.training.stop_consensus import StopConsensus
from vitsweep.training.trainer import Trainer
from vitsweep.world import World


@dataclass(frozen=True)
class CheckpointManager:
    """Saves and resumes the measurement and the training of a run.

    Attributes:
        folder: of this attempt, which alone writes into it.
        earlier: folders of earlier attempts of the same run, newest first.
        stop: agreement of all ranks on when to stop.
    """

    folder: Path
    earlier: tuple[Path, ...]
    stop: StopConsensus

    def load_measurement(self) -> dict[str, Any] | None:
        """Return what an earlier attempt measured before it trained; the same on every rank."""
        found = newest(self.earlier, MEASUREMENT_FILE)
        return _broadcast_from_rank_0(read_json(found / MEASUREMENT_FILE) if found else None)

    def save_measurement(self, measured: dict[str, Any], world: World) -> None:
        """Save the measurement before training begins, so that no attempt measures again."""
        if world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self.folder / MEASUREMENT_FILE, measured)

    def resume(self, trainer: Trainer) -> tuple[int, float]:
        """Load the newest checkpoint, if there is one; return its optimizer steps and seconds.

        Raises:
            VitsweepError: ranks or mesh are not those that saved it.
        """
        found = _broadcast_from_rank_0(newest(self.earlier, INFO_FILE))
        if found is None:
            return 0, 0.0
        info = checkpoint.load(trainer, found)
        return info.step, info.seconds

    def stop_requested(self, *, at_once: bool) -> bool:
        """Whether all ranks stop now (see `StopConsensus.agreed`)."""
        return self.stop.agreed(at_once=at_once)

    def save_and_stop(self, trainer: Trainer, step: int, seconds: float) -> NoReturn:
        """Save a checkpoint and end the training.

        Raises:
            TrainingInterrupted: always.
        """
        checkpoint.save(trainer, step, seconds, self.folder)
        raise TrainingInterrupted(f"Training is saved after {step} steps.")


def _broadcast_from_rank_0(value: Any) -> Any:
    """Shared disks show a new file to some nodes earlier than to others: rank 0 decides."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]
