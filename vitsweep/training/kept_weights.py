"""Keeps the weights of a training in files that need no vitsweep to load."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.collectives.messages import from_first
from vitsweep.errors import disk_full_error
from vitsweep.files import read_bytes, write_atomically
from vitsweep.training.checkpoint_files import newest

if TYPE_CHECKING:
    from vitsweep.training.epochs import Evaluation
    from vitsweep.training.trainer import Trainer

FILE, AVERAGED_FILE = "weights.safetensors", "weights_averaged.safetensors"


@dataclass
class WeightKeeper:
    """Writes what `task.keep` names: the weights after the last epoch, or those of the best evaluation.

    The tensors have the names of the model before any technique; rank 0 writes them. The best weights
    are chosen by one half of the held-out images, and their accuracy is that on the other half, which
    had no part in the choice.

    Attributes:
        folder: of the run's files.
        keep: `task.keep`.
        earlier: folders where earlier attempts at this training kept theirs, newest first.
        reason: why there is no file, or "".
    """

    folder: Path
    keep: str
    earlier: tuple[Path, ...] = ()
    reason: str = ""
    _best: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return where the weights are, from the sweep's folder, or why there are none, for the record."""
        if self.keep == "none":
            return {}
        if self.reason:
            return {"weights_reason": self.reason}
        return {"weights_file": str(Path(*self.folder.parts[-4:], FILE))}

    def resume(self) -> None:
        """Go on from the best weights of an earlier attempt; every rank calls it."""
        if self.keep == "best":
            self._best = from_first(_best_of(self.earlier))

    def after(self, trainer: "Trainer", point: "Evaluation") -> None:
        """Keep the weights where they are the best so far; every rank calls it."""
        if self.keep != "best" or point.accuracy_choosing <= self._best.get("choosing", -1.0):
            return
        self._best = {
            "choosing": point.accuracy_choosing,
            "epoch": point.epoch,
            "accuracy_top1": point.accuracy_reporting,
        }
        self._write(trainer, self._best)

    def finish(self, trainer: "Trainer", points: list[dict[str, float]]) -> dict[str, float | None]:
        """Keep the last weights where they are wanted; return the columns of what is kept."""
        if self.keep == "none":
            return {}
        kept = self._best  # none where the training went on after its last evaluation
        if self.keep == "final" or not kept:
            kept = {key: points[-1][key] for key in ("epoch", "accuracy_top1")}
            self._write(trainer, kept)
        elif trainer.world.rank == 0 and not (self.folder / FILE).exists():
            self._take_from_earlier()
        if self.reason:
            return {}
        return {"kept_epoch": kept["epoch"], "kept_accuracy_top1": kept["accuracy_top1"]}

    def _write(self, trainer: "Trainer", facts: dict[str, Any]) -> None:
        from vitsweep.training.shards import plain_weights

        self._save(FILE, plain_weights(trainer), trainer.world.rank, facts)
        if trainer.average is not None:
            with trainer.averaged_weights():
                averaged = plain_weights(trainer)
            self._save(AVERAGED_FILE, averaged, trainer.world.rank, facts)

    def _save(self, name: str, weights: dict[str, Any], rank: int, facts: dict[str, Any]) -> None:
        from safetensors.torch import save

        if rank == 0:
            about = {"format": "pt", "cell": self.folder.parent.parent.name}
            header = about | {key: str(value) for key, value in facts.items()}
            self._save_bytes(name, save(weights, header))

    def _save_bytes(self, name: str, content: bytes) -> None:
        """Write a file; where the disk is full, the run's other results are worth more than it."""
        try:
            write_atomically(self.folder / name, content)
        except OSError as error:
            if not disk_full_error(error):
                raise
            self.reason = f"`{self.folder / name}` could not be written: {error.strerror}."

    def _take_from_earlier(self) -> None:
        for name in (FILE, AVERAGED_FILE):
            if found := newest(self.earlier, name):
                self._save_bytes(name, read_bytes(found / name))


def _best_of(folders: Iterable[Path]) -> dict[str, float]:
    from safetensors import safe_open

    found = newest(folders, FILE)
    if found is None:
        return {}
    with safe_open(found / FILE, "pt") as file:
        facts = file.metadata() or {}
    return {key: float(facts[key]) for key in ("choosing", "epoch", "accuracy_top1")}
