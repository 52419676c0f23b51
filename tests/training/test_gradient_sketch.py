"""Five numbers of a step's gradients: alike however it is computed, apart where a gradient is wrong."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cells import cell
from tests.ranks import on_ranks, placed
from tests.training.alone import alone, batch, trainer_of
from vitsweep.model.build import first_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import sketch_next_gradients
from vitsweep.training.timed_steps import endless
from vitsweep.world import World

PLAIN = ("model.depth=3", "model.width=64", "model.mlp_width=2304")  # 147,456 numbers: three rows
FLOAT64 = "precision.dtype=float64"


def sketch(spec: CellSpec, change: Callable[[str, Tensor], Tensor] | None = None) -> list[float]:
    """Of one step, whose gradients a fault changes."""
    trainer = trainer_of(spec)
    for name, parameter in trainer.model.named_parameters():
        if change:
            parameter.register_hook(lambda gradient, name=name: change(name, gradient))
    read = sketch_next_gradients(trainer)
    trainer.step(iter([batch()]))
    kept = read()
    trainer.step(iter([batch(1)]))
    assert read() == kept, "the next step leaves it as it is"
    return kept


def apart(found: list[float], wanted: list[float]) -> float:
    assert len(found) == len(wanted) == 5
    return math.dist(found[1:], wanted[1:]) / 2


def turned(gradient: Tensor, share: float, start: int = 0) -> Tensor:
    """The gradient with an error in a direction of its own."""
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)).to(gradient)
    noise.view(-1)[:start] = 0
    return gradient + share * gradient.norm() / noise.norm() * noise


FAULTS = {
    "every_gradient_turned": lambda name, g: turned(g, 1e-3),
    "one_gradient_turned": lambda name, g: (
        turned(g, 1e-2) if name == "blocks.1.norm_mlp.weight" else g
    ),
    "last_row_turned": lambda name, g: turned(g, 1e-2, 140_000) if g.numel() > 140_000 else g,
    "one_bias_longer": lambda name, g: 1.01 * g if name == "blocks.0.mlp.down.bias" else g,
    "matrices_longer": lambda name, g: 1.001 * g if g.ndim > 1 else g,
    "two_gradients_exchanged": lambda name, g: g.flip(0) if name == "head.weight" else g,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_a_thousandth_shows(fault: str) -> None:
    wanted, found = (sketch(alone(*PLAIN, FLOAT64), f) for f in (None, FAULTS[fault]))
    assert apart(found, wanted) > 3e-4
    if fault == "every_gradient_turned":
        assert apart(found, wanted) < 3e-3, "it is about as large as the error of gradients"


def test_nothing_shows_where_gradients_are_the_same_or_have_a_common_factor() -> None:
    wanted = sketch(alone(*PLAIN, FLOAT64))
    assert sketch(alone(*PLAIN, FLOAT64)) == wanted
    for words in (["optimizer=sgd_foreach"], ["averaging=ema"], ["memory=recompute_blocks"]):
        assert apart(sketch(alone(*PLAIN, FLOAT64, *words)), wanted) < 1e-12
    clipped = sketch(alone(*PLAIN, FLOAT64, "optimizer.clip_norm=0.01"))
    assert clipped[0] == pytest.approx(0.01)
    assert apart(clipped, wanted) < 1e-9
    assert wanted[0] > 0.1


def test_a_gradient_that_vanishes_may_be_anything_small_and_one_that_is_missing_is_zero() -> None:
    def tiny(name: str, gradient: Tensor) -> Tensor:
        return 0 * gradient + 1e-7 if name == "blocks.0.attention.out.bias" else gradient

    def zero(name: str, gradient: Tensor) -> Tensor:
        return 0 * gradient if name == "blocks.0.attention.out.bias" else gradient

    spec = alone(*PLAIN, FLOAT64)
    assert apart(sketch(spec, tiny), sketch(spec, zero)) < 1e-4


def test_there_is_none_where_a_gradient_is_not_finite() -> None:
    assert sketch(alone(*PLAIN), lambda name, gradient: gradient / 0) == []


def _sketches(world: World, specs: list[CellSpec]) -> list[list[float]]:
    found = []
    for spec in specs:
        own = placed(world, spec)
        trainer = parallelize(first_model(spec), spec, own)
        with contextlib.closing(spec.data.open(spec, own)) as batches:
            read = sketch_next_gradients(trainer)
            trainer.step(endless(batches))
            found.append(read())
    return found


SPLIT = (
    "sharding=ddp",
    "sharding=zero1",
    "sharding=fsdp memory=recompute_blocks",
    "tensor_parallel=megatron",
    "sequence_parallel=ulysses",
    "pipeline_parallel=gpipe",
)


def test_two_ranks_have_that_of_one(tmp_path: Path) -> None:
    common = ("model.depth=4", "data=digits", "batch.images_per_step=16")
    one = cell(*common, "resources.ranks_per_node=1", "sharding=none")
    two = [cell(*common, "resources.ranks_per_node=2", *words.split()) for words in SPLIT]
    [[wanted]] = on_ranks(1, _sketches, one, [one], folder=tmp_path)
    for sketches in on_ranks(2, _sketches, two[0], two, folder=tmp_path):
        found = dict(zip(SPLIT, sketches, strict=True))
        assert all(apart(each, wanted) < 1e-5 for each in sketches), found
        assert [each[0] for each in sketches] == pytest.approx([wanted[0]] * len(two), rel=1e-5)
