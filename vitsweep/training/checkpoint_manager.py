"""CheckpointManager: what one attempt of a run leaves to the next one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from vitsweep.training import checkpoint
from vitsweep.training.saved import (
    MEASURED,
    TRAINED,
    Interrupted,
    newest,
    read_whole,
    write_whole,
)
from vitsweep.training.stop_consensus import StopConsensus
from vitsweep.training.trainer import Trainer
from vitsweep.world import World


@dataclass(frozen=True)
class CheckpointManager:
    """Keeps the measurement and the training of a run.

    Attributes:
        folder: of this attempt, which alone writes into it.
        earlier: folders of earlier attempts of the same run, newest first.
        stop: tells when to stop.
    """

    folder: Path
    earlier: tuple[Path, ...]
    stop: StopConsensus

    def measured(self) -> dict[str, Any] | None:
        """Return what an earlier attempt measured before it trained; the same on every rank."""
        found = newest(self.earlier, MEASURED)
        return _as_rank_0_sees(read_whole(found / MEASURED) if found else None)

    def keep_measured(self, measured: dict[str, Any], world: World) -> None:
        """Keep it before training begins: it shall not be measured again."""
        if world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / MEASURED, measured)

    def resume(self, trainer: Trainer) -> tuple[int, float]:
        """Bring a new trainer to where the latest attempt was saved; return steps and seconds.

        Raises:
            VitsweepError: another world saved it.
        """
        found = _as_rank_0_sees(newest(self.earlier, TRAINED))
        if found is None:
            return 0, 0.0
        trained = checkpoint.load(trainer, found)
        return trained.step, trained.seconds

    def told_to_stop(self, *, at_once: bool) -> bool:
        """Whether all ranks stop now (see `StopConsensus.agreed`)."""
        return self.stop.agreed(at_once=at_once)

    def save_and_stop(self, trainer: Trainer, step: int, seconds: float) -> NoReturn:
        """Save, and say so.

        Raises:
            Interrupted: always.
        """
        checkpoint.save(trainer, step, seconds, self.folder)
        raise Interrupted(f"Training is saved after {step} steps.")


def _as_rank_0_sees(value: Any) -> Any:
    """Shared disks show a new file to some nodes earlier than to others."""
    told = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    return told[0]
