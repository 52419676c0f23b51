"""A training with checks is the training without, bit for bit; and a sound one is found to be sound."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitsweep
from tests.cells import TINY, entry
from tests.ranks import on_ranks, placed
from tests.user_modules import Stack
from vitsweep.errors import VitsweepError
from vitsweep.model.build import build_model
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

STEPS, IMAGES = 4, 8
Choice = tuple[str, ...]


class Normed(nn.Module):
    """A convolution, a norm over the batch, dropout and a counter of calls outside of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8)) for _ in range(2)
        )
        self.head, self.calls = nn.Linear(8, 10), 0

    def forward(self, image: Tensor) -> Tensor:
        self.calls += not vitsweep.is_checking()
        x = self.norm(self.stem(image)).relu().mean((2, 3))
        for layer in self.layers:
            x = x + layer(x)
        found: Tensor = self.head(x)
        return found


MODELS: dict[str, Any] = {"vit": None, "stack": lambda: Stack(1, 10, 16, 2), "normed": Normed}
CORE = {
    1: (
        ("vit", ("precision=O2", "batch.accumulation_steps=2", "averaging=ema")),
        ("normed", ("precision=fp32", "optimizer=adamw_contiguous")),
        ("normed", ("precision=O2", "precision.half_dtype=float16")),
    ),
    2: (
        ("vit", ("sharding=fsdp", "precision=O2", "averaging=ema")),
        ("normed", ("sharding=ddp", "precision=O1")),
        ("stack", ("sharding=zero1", "precision=fp32", "batch.accumulation_steps=2")),
        ("vit", ("sharding=zero2", "precision=O3")),
    ),
}  # fmt: skip
KNOBS = {
    "precision": ("fp32", "bf16", "O1", "O2", "O3"),
    "precision.half_dtype": ("bfloat16", "float16"),
    "sharding": ("ddp", "zero1", "zero2", "fsdp"),
    "optimizer": ("adamw_loop", "adamw_fused", "adamw_contiguous", "sgd_loop"),
    "memory": ("keep_all", "recompute_blocks", "recompute_selected"),
    "averaging": ("none", "ema"),
    "batch.accumulation_steps": ("1", "2"),
    "optimizer.clip_norm": ("null", "0.1"),
}  # fmt: skip


def planned(model: str, choice: Choice, ranks: int) -> Any:
    shape = TINY if model == "vit" else ("model=module", "model.target=tests.user_modules.build",
                                         "batch.images_per_step=16")  # fmt: skip
    size = (f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1")
    return entry(*shape, *size, *choice)


def drawn(ranks: int, count: int) -> list[tuple[str, Choice]]:
    rng, found = random.Random(ranks), []
    while len(found) < count:
        choice = tuple(f"{knob}={rng.choice(values)}" for knob, values in KNOBS.items())
        choice = tuple(
            c for c in choice if "half_dtype" not in c or "precision=O" in " ".join(choice)
        )
        model = rng.choice([*MODELS])
        if not planned(model, choice, ranks).reasons:
            found.append((model, choice))
    return found


def cell_of(model: str, choice: Choice, ranks: int) -> CellSpec:
    cell: CellSpec = planned(model, choice, ranks).spec
    return cell


def begun(world: World, model: str, cell: CellSpec) -> Any:
    placed(world, cell)
    torch.manual_seed(cell.seed)
    return vitsweep.apply(cell, MODELS[model]() if MODELS[model] else build_model(cell))


def batches(
    world: World, cell: CellSpec, steps: int, *, seed: int = 0, learnt: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    shape = (IMAGES, *cell.model.input_shape(cell.batch.resolution_px))
    generator = torch.Generator().manual_seed(97 * seed + world.rank)
    for _ in range(steps):
        if learnt:
            generator.manual_seed(97 * seed + world.rank)
        labels = torch.randint(10, (IMAGES,), generator=generator)
        yield torch.randn(shape, generator=generator), labels


def differences(world: World, cases: list[tuple[str, CellSpec]]) -> list[str]:
    """Return what checks change of a training, and what they find of sound ones."""
    found = []
    for model, cell in cases:
        trained = []
        for checks in (True, False):
            torch.manual_seed(5)
            with begun(world, model, cell) as training:
                for step, batch in enumerate(batches(world, cell, STEPS)):
                    if checks and step:
                        result = vitsweep.check(training, batch, raise_on_fault=True)
                        found += (
                            []
                            if 2 * result.distance <= 1 or result.verdict == "not judged"
                            else [f"{cell.cell_id}: {result}"]
                        )
                        found += (
                            [] if result.is_repeatable else [f"{cell.cell_id} is not repeatable"]
                        )
                    loss = training.step(batch)
                calls = [getattr(module, "calls", 0) for module in training.model.modules()]
                modes = [module.training for module in training.model.modules()]
                draws = vars(training.trainer.draws)
                state = training.state_dict()
                numbers = [float(loss), calls, modes, draws, torch.rand(3).tolist()]
                trained.append((state.pop("tensors"), [state, *numbers]))
        (with_checks, numbers), (without, wanted) = trained
        names = [n for n, t in without.items() if not torch.equal(t, with_checks[n])]
        names += [
            f"{own} is not {one}" for own, one in zip(numbers, wanted, strict=True) if own != one
        ]
        found += [f"{model} {cell.cell_id}: {name}" for name in names]
    return found


@pytest.mark.smoke
def test_a_training_with_checks_is_the_one_without_bit_for_bit(tmp_path: Path) -> None:
    cases = [(model, cell_of(model, choice, 1)) for model, choice in CORE[1]]
    assert on_ranks(1, differences, cases[0][1], cases, folder=tmp_path) == [[]]


def test_so_is_one_on_two_ranks(tmp_path: Path) -> None:
    cases = [(model, cell_of(model, choice, 2)) for model, choice in CORE[2]]
    for found in on_ranks(2, differences, cases[0][1], cases, folder=tmp_path):
        assert not found


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_so_are_ten_drawn_ones(ranks: int, tmp_path: Path) -> None:
    cases = [(model, cell_of(model, choice, ranks)) for model, choice in drawn(ranks, 10)]
    for found in on_ranks(ranks, differences, cases[0][1], cases, folder=tmp_path):
        assert not found


def test_what_cannot_be_checked_is_refused_by_name() -> None:
    cell = cell_of("stack", ("precision=fp32",), 1)
    torch.manual_seed(0)
    with vitsweep.apply(cell, Stack(1, 10, 16, 2)) as training:
        batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
        with pytest.raises(VitsweepError, match="took no step"):
            vitsweep.check(training, batch)
        training.step(batch)
        training.bare = None
        with pytest.raises(VitsweepError, match="needs a copy of the Stack"):
            vitsweep.check(training, batch)


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of("stack", ("precision=fp32",), 1)
    torch.manual_seed(0)
    with vitsweep.apply(cell, Stack(1, 10, 16, 2)) as training:
        batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
        training.step(batch)
        memory = type("Memory", (), {"available": 1000})
        monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
        with pytest.raises(VitsweepError, match=r"needs 0\.00 GiB .* rank 0 has 0\.00 GiB"):
            vitsweep.check(training, batch)


def test_an_overflow_at_the_loss_scale_is_not_judged() -> None:
    cell = cell_of("stack", ("precision=O2", "precision.half_dtype=float16"), 1)
    torch.manual_seed(0)
    with vitsweep.apply(cell, Stack(1, 10, 16, 2)) as training:
        batch = torch.randn(4, 1, 8, 8), torch.arange(4)
        training.step(batch)
        training.trainer.scaler.restore({**training.trainer.scaler.state(), "scale": 2.0**40})  # type: ignore[union-attr]
        result = vitsweep.check(training, batch, raise_on_fault=True)
        assert result.verdict == "not judged"
        assert "overflow at a loss scale of" in result.sentence
        assert training.trainer.scaler.current == 2.0**40  # type: ignore[union-attr]


class OnlyNormed(nn.Sequential):
    """Its norm takes no batch of one image."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


def test_a_small_batch_of_a_batch_norm_in_half_precision_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitsweep.extras.guard.check.ENOUGH", 0.0)
    torch.manual_seed(0)
    with vitsweep.apply("precision=bf16 resources.threads_per_rank=1", OnlyNormed()) as training:
        batch = torch.randn(4, 1, 8, 8), torch.arange(4)
        training.step(batch)
        assert vitsweep.check(training, batch).verdict == "sound"


def test_a_batch_without_labels_is_not_judged_and_says_nothing_of_the_device() -> None:
    with vitsweep.apply("resources.threads_per_rank=1", Stack(1, 10, 16, 2)) as training:
        images = torch.randn(4, 1, 8, 8)
        training.step((images, torch.arange(4)))
        result = vitsweep.check(training, (images, torch.full((4,), -100)))
        assert result.verdict == "not judged"
        assert result.is_repeatable
        assert "deterministic" not in result.sentence


def test_gradients_that_are_all_zero_are_not_judged() -> None:
    def nothing(outputs: Tensor, batch: Any) -> Tensor:
        return (0 * outputs).sum() + 1

    model = Stack(1, 10, 16, 2)
    with vitsweep.apply("resources.threads_per_rank=1", model, nothing) as training:
        batch = torch.randn(4, 1, 8, 8), torch.arange(4)
        training.step(batch)
        result = vitsweep.check(training, batch)
        assert result.verdict == "not judged"
        assert "all gradients are zero" in result.sentence
