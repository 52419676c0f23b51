"""What only a GPU runs, beside the plain choice on the same GPU: recorded steps, copies on streams, FP8."""

from dataclasses import replace

import pytest
import torch

from tests.cells import GPU_NODE, TINY, entry
from tests.data.cells_and_worlds import world
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize

ONE = ("sharding=none", "resources.ranks_per_node=1", "optimizer=adamw_fused")
WIDE = ("model.width=64", "model.mlp_width=128")
STEPS = 6


def losses(*overrides: str) -> list[float]:
    """Train a small model on the GPU; every step has a batch of its own."""
    planned = entry(*TINY, *ONE, *overrides, machine=GPU_NODE)
    assert not planned.reasons
    spec, device = planned.spec, torch.device("cuda")
    torch.manual_seed(spec.seed)
    trainer = parallelize(build_model(spec), spec, replace(world(), device=device))
    shape = (spec.micro_batch, *spec.model.input_shape(spec.batch.resolution_px))
    draws = torch.Generator("cuda").manual_seed(1)
    found = []
    for _ in range(STEPS):
        images = torch.randn(shape, device=device, generator=draws)
        labels = torch.randint(10, shape[:1], device=device, generator=draws)
        found.append(trainer.step(iter([(images, labels)])).clone())
    return torch.stack(found).tolist()


@pytest.mark.gpu(count=1)
@pytest.mark.parametrize(
    ("plain", "choice", "relative"),
    [
        (("precision=bf16",), ("precision=fp8", "precision.layers=all"), 1e-1),
    ],
)
def test_a_choice_of_gpus_trains_as_the_default_one(
    plain: tuple[str, ...], choice: tuple[str, ...], relative: float
) -> None:
    assert losses(*WIDE, *choice) == pytest.approx(losses(*WIDE, *plain), rel=relative)
