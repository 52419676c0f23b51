"""The traced peak is that of torch's memory tracker in a real step."""

import pytest
import torch

from tests.cells import entry
from vitsweep.extras.predict.trace import trace_cell
from vitsweep.measure.memory import _tensor_tracker
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.world import World

SMALL = (
    "model=vit_tiny",
    "model.depth=5",
    "data=synthetic",
    "batch.images_per_step=4",
    "batch.resolution_px=64",
    "sharding=none",
    "resources.ranks_per_node=1",
)
CHOICES = [
    ("precision=fp32",),
    ("precision=O1", "optimizer=adamw_foreach"),
    ("precision=O2", "memory=recompute_blocks"),
]


@pytest.mark.parametrize("choices", CHOICES, ids=" ".join)
def test_the_peak_is_that_of_torchs_tracker(choices: tuple[str, ...]) -> None:
    cell = entry(*SMALL, *choices).spec
    device = torch.device("cpu")
    world = World(rank=0, local_rank=0, size=1, device=device, shape=cell.mesh, mesh=None)
    trainer = parallelize(build_model(cell), cell, world)
    batch = (torch.randn(cell.micro_batch, 3, 64, 64), torch.zeros(cell.micro_batch).long())
    trainer.step(iter([batch]))  # the optimizer has its state in the second step
    tracker = _tensor_tracker()
    tracker.track_external(trainer.model, trainer.optimizer, *batch)
    with tracker:
        trainer.step(iter([batch]))
    assert trace_cell(cell).memory.peak == pytest.approx(
        tracker.peak_bytes(device)["Total"], rel=0.01
    )
