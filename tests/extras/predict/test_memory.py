"""The traced peak is that of torch's memory tracker in a real step."""

import pytest
import torch

from tests.cells import entry
from vitsweep.extras.predict.trace import trace_cell
from vitsweep.measure.memory import _tensor_tracker, optimizer_tensors
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
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
DIFFUSION = [
    ("model=dit_nano", "data=digits"),
    ("model=stdit_nano", "data=moving_digits"),
    ("model=stdit_nano", "data=synthetic_latents", "data.num_frames=8", "data.text_vectors=16",
     "data.text_width=64", "batch.resolution_px=16"),
]  # fmt: skip
MEMORY = ("keep_all", "recompute_blocks", "recompute_selected")


def assert_peaks_are_equal(cell: CellSpec) -> None:
    device = torch.device("cpu")
    world = World(rank=0, local_rank=0, size=1, device=device, shape=cell.mesh, mesh=None)
    trainer = parallelize(build_model(cell), cell, world)
    batch = trainer.objective.example(cell.micro_batch, torch.Generator())
    trainer.step(iter([batch]))  # the optimizer has its state in the second step
    tracker = _tensor_tracker()
    averages = trainer.average.averages if trainer.average else []
    tracker.track_external(trainer.model, *optimizer_tensors(trainer), *averages, *batch.values())
    with tracker:
        trainer.step(iter([batch]))
    planned, seen = trace_cell(cell).memory.peak, tracker.peak_bytes(device)["Total"]
    assert planned == pytest.approx(seen, rel=0.01), cell


OBJECTIVES = [
    ("objective=masked_autoencoder", "objective.decoder_depth=2", "objective.decoder_width=96"),
    ("objective=lejepa", "objective.projector_width=256", "precision=O1"),
    ("objective=self_distillation", "objective.prototypes=512", "objective.head_width=128"),
]


@pytest.mark.parametrize("choices", CHOICES, ids=" ".join)
def test_the_peak_is_that_of_torchs_tracker(choices: tuple[str, ...]) -> None:
    assert_peaks_are_equal(entry(*SMALL, *choices).spec)


@pytest.mark.full
@pytest.mark.parametrize("model", DIFFUSION, ids=" ".join)
def test_the_peak_of_diffusion_transformers_is_that_of_torchs_tracker(
    model: tuple[str, ...],
) -> None:
    common = ("objective=flow_matching", "sharding=none", "resources.ranks_per_node=1")
    for precision in ("fp32", "O1", "O2"):
        for memory in MEMORY:
            each = entry(*model, *common, f"precision={precision}", f"memory={memory}",
                         "batch.images_per_step=16")  # fmt: skip
            assert not each.reasons
            assert_peaks_are_equal(each.spec)


@pytest.mark.full
@pytest.mark.parametrize("choices", OBJECTIVES, ids=lambda choices: choices[0])
def test_the_peak_of_objectives_on_views_is_that_of_torchs_tracker(
    choices: tuple[str, ...],
) -> None:
    assert_peaks_are_equal(entry(*SMALL, *choices).spec)
