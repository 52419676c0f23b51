"""The product's side of a proof: the cell, as a run of it trains."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from vitsweep.execution.process import joined_process_group, own_world
from vitsweep.execution.rank_processes import rendezvous
from vitsweep.extras.take_home.rank import Named, leave, run
from vitsweep.job_environment import environment_rank, init_method
from vitsweep.model.build import first_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import plain_weights, whole_tensors
from vitsweep.world import World


class Cell:
    """A cell in this process."""

    def __init__(self, cell: CellSpec, world: World) -> None:
        self.device, self._updates = world.device, 0
        self._cell, self._gradients = cell, Named()
        self._trainer = parallelize(first_model(cell), cell, world)
        self._trainer.before_update = self._keep

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch of this rank; return its mean loss."""
        trainer, parts = self._trainer, self._cell.batch.accumulation_steps
        loss = trainer.step(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        self._updates += not (trainer.skipped and bool(trainer.skipped[-1]))
        return loss

    def updates(self) -> int:
        """Return how many steps changed the weights."""
        return self._updates

    def gradients(self) -> Named:
        """Return whole gradients of the last update."""
        return self._gradients

    def weights(self) -> Named:
        """Return whole weights and buffers."""
        return plain_weights(self._trainer)

    def masters(self) -> Named:
        """Return whole weights as the optimizer updates them."""
        masters = self._trainer.masters

        def read(parameter: nn.Parameter) -> Tensor | None:
            if not parameter.requires_grad:
                return None
            return masters.of(parameter) if masters else parameter

        return self._whole(read)

    def _keep(self) -> None:
        overflowed = self._trainer.skipped and bool(self._trainer.skipped[-1])
        if not overflowed:
            self._gradients = self._whole(self._trainer.gradient_of)

    def _whole(self, read: Callable[[nn.Parameter], Tensor | None]) -> Named:
        names = self._trainer.names
        found = whole_tensors(self._trainer, read)
        return {
            names.get(n, n): value.detach().to("cpu", copy=True).contiguous()
            for n, value in found.items()
        }


def main(folders: list[Path]) -> None:
    """Do this rank's part."""
    cells = {folder: _read(folder) for folder in folders}
    first = cells[folders[0]]
    rank, local_rank, size = environment_rank() or (0, 0, 1)
    first.runtime.set_up(first, local_rank)

    def opened(folder: Path) -> Cell:
        cell = cells[folder]
        is_same = cell.mesh == world.shape
        return Cell(cell, world if is_same else own_world(cell, rank, local_rank))

    with rendezvous() as alone:
        method = init_method() if size > 1 else alone
        with joined_process_group(first, rank, local_rank, method) as world:
            run(opened, folders, "cell")


def _read(folder: Path) -> CellSpec:
    """Return a cell that the command which started this process wrote."""
    cell: CellSpec = pickle.loads((folder / "cell.pickle").read_bytes())
    return cell


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
    leave()
