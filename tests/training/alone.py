"""One process, no process group: cells to be trained and looked into."""

from typing import Any

import torch
from torch import Tensor

from tests.cells import cell
from tests.data.cells_and_worlds import world
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainer import MicroBatch, Trainer

ONE = ("resources.ranks_per_node=1", "sharding=none", "batch.images_per_step=8")


def alone(*overrides: str) -> CellSpec:
    """A tiny cell on one rank."""
    return cell(*ONE, *overrides)


def trainer_of(spec: CellSpec) -> Trainer:
    """The cell's model, ready to train, from its seed."""
    torch.manual_seed(spec.seed)
    return parallelize(build_model(spec), spec, world())


def batch(step: int = 0, images: int = 8) -> MicroBatch:
    """Images (B, 1, 8, 8) and labels (B,)."""
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn((images, 1, 8, 8), generator=generator),
        torch.randint(10, (images,), generator=generator),
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of what forward and backward see."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def state(trainer: Trainer) -> list[Any]:
    """Copies of what this rank's optimizer keeps, in the order of its parameters."""
    optimizer = trainer.optimizer
    kept = optimizer.state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept[p].items()}
        for p in parameters
    ]
