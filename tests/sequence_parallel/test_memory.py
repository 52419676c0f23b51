"""Activations fall as 1/N over the ranks that share tokens."""

from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from tests.sequence_parallel.cases import answers, cell
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.prove import _global_batch
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

SINGLE = ("precision.dtype=float32", "batch.images_per_step=8", "model.mlp_width=128")
DEEP_VIDEO = ("model=video_vit_nano", "data=moving_digits", "model.depth=12", "data.num_frames=8")
DEEP_IMAGE = ("model.depth=12", "classifier=pooled", "batch.resolution_px=16")


def activation_bytes(world: World, cells: list[CellSpec]) -> list[int]:
    """Peak bytes of activations of one forward and backward pass, by torch's tensor tracker."""
    return [_activation_bytes(world, each) for each in cells]


def _activation_bytes(world: World, each: CellSpec) -> int:
    torch.manual_seed(0)
    trainee = parallelize(build_model(each), each, world)
    images, labels = _global_batch(each, 0, world)
    trainee.loss(images, labels).backward()  # gradients are there before
    tracker = MemTracker()
    tracker.track_external(trainee.model, trainee.optimizer, images, labels)
    with tracker:
        trainee.loss(images, labels).backward()
    by_kind = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    kinds = {getattr(kind, "value", kind): value for kind, value in by_kind.items()}
    return kinds["Activation"] + kinds["Temp"]


MODELS = {"ulysses": DEEP_IMAGE, "ring": DEEP_IMAGE, "usp": DEEP_IMAGE, "dsp": DEEP_VIDEO}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_peak_of_activations_falls_as_one_over_n(ranks: int, tmp_path: Path) -> None:
    plain = [cell(1, *model, *SINGLE) for model in (DEEP_IMAGE, DEEP_VIDEO)]
    alone = [peak for _, peak in answers(activation_bytes, plain, tmp_path)]
    for method, model in MODELS.items():
        shared = cell(ranks, f"sequence_parallel={method}", *model, *SINGLE)
        ((_, each),) = answers(activation_bytes, [shared], tmp_path)
        whole = alone[model == DEEP_VIDEO]
        assert each == pytest.approx(whole / ranks, rel=0.15), method
