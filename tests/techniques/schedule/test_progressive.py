"""Epochs of growing size: images, positions and patches of each, and that the training goes on with them."""

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.nn.functional import interpolate

from tests.cells import cell, entry
from tests.training.alone import ONE, alone, trainer_of
from tests.training.test_checkpoint import Told
from vitsweep.cell import RunContext, run_cell
from vitsweep.model.build import build_model
from vitsweep.model.initialize import Draws
from vitsweep.model.vit import resized_positions
from vitsweep.spec.model_variant import EpochSize
from vitsweep.training.checkpoint_files import TrainingInterrupted
from vitsweep.training.checkpoint_manager import CheckpointManager, StopConsensus
from vitsweep.training.epochs import EpochSizes, flops_share, train_epochs

GROWING = (
    "task=train", "task.epochs=5", "schedule=progressive", "schedule.growth_epochs=0.8",
    "schedule.first_keep=0.25", "schedule.stages=2", "batch.images_per_step=256",
)  # fmt: skip


def test_sizes_grow_in_stages_to_the_full_one() -> None:
    spec = alone(*GROWING, "batch.resolution_px=32", "model.patch_px=4")
    sizes = [spec.schedule.size(spec, epoch) for epoch in range(5)]
    first, middle, full = EpochSize(16, 0.25), EpochSize(24, 0.625), EpochSize(32, 1.0)
    assert sizes == [first, first, middle, middle, full]
    plain = alone("task=train", "task.epochs=5")
    assert flops_share(plain) == 1.0


def test_flops_are_those_of_the_models_of_each_epoch() -> None:
    """Counted by torch: two FLOPs of a multiply-add, forward."""
    from torch.utils.flop_counter import FlopCounterMode

    spec = alone(*GROWING, "batch.resolution_px=32", "model.patch_px=4", "attention=sdpa_math")
    model = spec.attention.apply(spec_model(spec))  # fused kernels compute a product again
    sizes, counted = EpochSizes(model), []
    for epoch in range(5):
        size = spec.schedule.size(spec, epoch)
        [(images, _)] = sizes.begin(size, iter([(torch.randn(1, 1, 32, 32), torch.zeros(1))]))
        with FlopCounterMode(display=False) as counter:
            model(images).sum().backward()
        counted.append(counter.get_total_flops())
    assert flops_share(spec) == pytest.approx(sum(counted) / 5 / counted[-1], rel=1e-3)
    assert 0.3 < flops_share(spec) < 0.6


def spec_model(spec: Any) -> Any:
    torch.manual_seed(0)
    model = build_model(spec)
    vars(model)["draws"] = Draws(spec.seed)
    return model.train()


def test_a_small_epoch_is_a_small_model_with_resized_positions() -> None:
    """What the hook and the embedding do equals a model built for the size, one image after the other."""
    spec = alone(*GROWING, "batch.resolution_px=32", "model.patch_px=4", "schedule.first_keep=1")
    model = spec_model(spec).double()
    small = build_model(alone("batch.resolution_px=16", "model.patch_px=4")).double()
    state = model.state_dict()
    grid = state["embedding.position"][1:].T.reshape(1, 32, 8, 8)
    resized = interpolate(grid, size=(4, 4), mode="bicubic", antialias=True)
    position = torch.cat([state["embedding.position"][:1], resized.reshape(32, 16).T])
    small.load_state_dict(state | {"embedding.position": position})
    images = torch.randn(3, 1, 32, 32, dtype=torch.float64)
    [(given, _)] = EpochSizes(model).begin(EpochSize(16), iter([(images, torch.zeros(3))]))
    wanted = [
        small(interpolate(image[None], size=(16, 16), mode="bilinear", antialias=True))
        for image in images
    ]
    torch.testing.assert_close(model(given), torch.cat(wanted), rtol=1e-12, atol=1e-12)
    model(given).sum().backward()
    assert (model.embedding.position.grad.abs().sum(1) > 0).all()


def test_positions_of_the_full_grid_are_left_as_they_are() -> None:
    position = torch.nn.Parameter(torch.randn(17, 4))
    assert resized_positions(position, 16, 1) is position


def test_a_training_of_growing_size_goes_on_in_the_midst_of_a_small_epoch(tmp_path: Path) -> None:
    spec = alone(*GROWING, "precision.dtype=float64")
    whole = trained(spec, None)
    told = Event()
    first = CheckpointManager(tmp_path / "1", (), StopConsensus(told, torch.device("cpu")))
    with pytest.raises(TrainingInterrupted):
        trained(spec, first, told)
    second = CheckpointManager(
        tmp_path / "2", (tmp_path / "1",), StopConsensus(Event(), torch.device("cpu"))
    )
    resumed = trained(spec, second)
    assert second.resumed == "Training went on after 6 steps."
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def trained(spec: Any, manager: CheckpointManager | None, told: Event | None = None) -> Any:
    from vitsweep.parallelize import parallelize

    model = spec_model(spec)
    sizes, world = EpochSizes(model), trainer_of(alone()).world
    trainer = parallelize(model, spec, world)
    batches: Any = spec.data.open(spec, world)
    if told:
        batches = Told(batches, told, 6)
    train_epochs(trainer, batches, manager, sizes)
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_the_record_says_how_many_flops_the_training_had(tmp_path: Path) -> None:
    spec = entry(
        *ONE, *GROWING, "model.depth=1", "model.width=32", "measurement=smoke",
        "measurement.prove=none",
    ).spec  # fmt: skip
    context = RunContext(calibration={}, proved="", folder=tmp_path)
    found = run_cell(spec, trainer_of(alone()).world, context)
    assert found.metrics["train_flops_share"] == pytest.approx(flops_share(spec))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.position=rotary", "schedule.first_keep=1"], "has a table for one grid"),
        (["tokens=drop"], "both drop patches"),
        (["schedule.growth_epochs=0.9"], "at most `schedule.growth_epochs=0.8`"),
        (["schedule.first_keep=1", "schedule.first_resolution_share=1"], "make no epoch smaller"),
        (["schedule.first_keep=0.01"], "leaves no token"),
        (["compilation=compile_blocks", "schedule.stages=9"], "at most `schedule.stages=6`"),
        (["compilation=compile_model"], "cannot hold in its graph"),
        (["pipeline_parallel=gpipe", "mesh.pipeline=2", "resources.ranks_per_node=2",
          "sharding=ddp"], "is set up for one"),
    ],
)  # fmt: skip
def test_what_cannot_change_size_is_refused(overrides: list[str], said: str) -> None:
    assert said in " ".join(entry(*ONE, *GROWING, "model.depth=2", *overrides).reasons)


def test_the_share_that_a_refusal_names_is_enough() -> None:
    three = (*ONE, *GROWING, "model.depth=2", "task.epochs=3")
    (reason,) = entry(*three, "schedule.growth_epochs=0.9").reasons
    assert "at most `schedule.growth_epochs=0.666`" in reason
    assert not entry(*three, "schedule.growth_epochs=0.666").reasons


def test_a_schedule_without_a_training_or_without_patches_is_refused() -> None:
    measured = entry(*ONE, "schedule=progressive").reasons
    assert "has no effect with `task=measure`" in " ".join(measured)
    convolutions = entry(*ONE, *GROWING, "model=resnet_nano").reasons
    assert "`schedule=progressive`" in " ".join(convolutions)


def test_the_plain_schedule_changes_no_cell_id() -> None:
    assert cell("schedule=constant").cell_id == cell().cell_id
