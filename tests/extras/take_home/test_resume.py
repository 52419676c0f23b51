"""A loop of one's own goes on as if it had not stopped, whatever it sets in the optimizer's groups."""

import io
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import vitsweep
from tests.cells import entry
from tests.ranks import on_ranks
from tests.user_modules import Stack, build
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

STEPS, BREAK = 6, 3
Schedule = Callable[[torch.optim.Optimizer], Callable[[int], Any]]
"""Takes an optimizer; returns what is called with the number of a step before it."""


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    scheduler = OneCycleLR(optimizer, 0.1, STEPS + 1, cycle_momentum=cycles)
    return stepping(scheduler)


def cosine(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    return stepping(CosineAnnealingLR(optimizer, STEPS))


def stepping(scheduler: Any) -> Callable[[int], Any]:
    def step(number: int) -> None:
        if number > scheduler.last_epoch:
            scheduler.step()

    step.scheduler = scheduler  # type: ignore[attr-defined]
    return step


def setting(values: dict[str, Callable[[int], Any]]) -> Schedule:
    """Set entries by hand before every second step, so that they must survive others."""

    def schedule(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
        def step(number: int) -> None:
            for group in optimizer.param_groups:
                group.update(
                    {k: of(number) for k, of in values.items() if not number % 2 and k in group}
                )

        return step

    return schedule


SCHEDULES: dict[str, Schedule] = {
    "one cycle": one_cycle,
    "cosine": cosine,
    "rates of NumPy": setting({"lr": lambda n: np.float64(0.1) / (n + 1)}),
    "float32 of NumPy": setting({"lr": lambda n: np.float32(0.1) / np.float32(n + 1)}),
    "by hand": setting({
        "betas": lambda n: (0.8 - n / 10, 0.9), "momentum": lambda n: 0.5 + n / 10, "eps": lambda n: 1e-3,
        "nesterov": lambda n: True, "amsgrad": lambda n: False,
    }),
    "weight decay": setting({"weight_decay": lambda n: np.int64(n + 1) / 10}),
}  # fmt: skip
OPTIMIZERS = (
    "adamw_loop",
    "adamw_foreach",
    "adamw_fused",
    "adamw_contiguous",
    "sgd_foreach",
    "muon",
)


def trained(cell: CellSpec, schedule: Schedule, batches: list[Any], stop: int | None) -> Any:
    """Return the weights after all steps, interrupted before one of them."""
    torch.manual_seed(0)
    file = io.BytesIO()
    for first, last in ((0, stop), (stop, STEPS)) if stop else ((0, STEPS),):
        with vitsweep.apply(cell, build()) as applied:
            step = schedule(applied.optimizer)
            scheduler = getattr(step, "scheduler", None)
            if first:
                file.seek(0)
                own, of_schedule = torch.load(file, weights_only=True)
                applied.load_state_dict(own)
                if scheduler:
                    scheduler.load_state_dict(of_schedule)
            for number in range(first or 0, last):
                step(number)
                applied.step(batches[number])
            found = applied.weights()
            torch.save((applied.state_dict(), scheduler and scheduler.state_dict()), file)
    return found


def resumed_differently(world: World, cells: list[CellSpec], every: int) -> list[str]:
    generator = torch.Generator().manual_seed(world.rank)
    batches = [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(STEPS)
    ]
    faults = []
    for cell, (name, schedule) in [*product(cells, SCHEDULES.items())][::every]:
        wanted, found = (trained(cell, schedule, batches, stop) for stop in (None, BREAK))
        apart = max(float((found[n] - w).abs().max()) for n, w in wanted.items())
        if apart > (1e-6 if "float32" in name else 0):
            faults.append(f"{cell.optimizer.name} {cell.sharding.name} {name}: {apart}")
    return faults


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("ranks", "shardings"), [(1, ["none"]), (2, ["ddp", "zero1", "fsdp"])])
def test_a_resumed_loop_trains_as_one_that_did_not_stop(
    ranks: int, shardings: list[str], every: int, tmp_path: Path
) -> None:
    cells = []
    for number, optimizer in enumerate(OPTIMIZERS):
        whole = optimizer in ("adamw_contiguous", "muon")
        sharding = shardings[0 if whole else number % len(shardings)]
        typed = (
            f"optimizer={optimizer}",
            f"sharding={sharding}",
            f"resources.ranks_per_node={ranks}",
        )
        cells.append(entry(*typed, "model=module", "model.target=tests.user_modules.build",
                           "resources.threads_per_rank=1", "optimizer.learning_rate=0.01").spec)  # fmt: skip
    for found in on_ranks(ranks, resumed_differently, cells[0], cells, every, folder=tmp_path):
        assert not found


def frozen_since(world: World, cells: list[CellSpec]) -> list[float]:
    """Return how far weights of a resumed loop that froze some lie from those of one that did not stop."""
    generator = torch.Generator().manual_seed(world.rank)
    batch = torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8)
    found = []
    for cell in cells:
        ends = []
        for stop in (BREAK, STEPS):
            states: list[Any] = []
            for first, last in ((0, stop), (stop, STEPS)):
                torch.manual_seed(0)
                with vitsweep.apply(cell, model := build()) as applied:
                    applied.load_state_dict(states[-1]) if states else None
                    for number in range(first, last):
                        model.stem.requires_grad_(not 1 < number < STEPS - 1)
                        applied.step(batch)
                    states.append(applied.state_dict())
                    ends.append(applied.weights())
        uninterrupted, resumed = ends[2], ends[1]
        found.append(max(float((w - resumed[n]).abs().max()) for n, w in uninterrupted.items()))
    return found


def test_what_was_frozen_and_thawed_again_comes_back(tmp_path: Path) -> None:
    cells = [
        entry("model=module", "model.target=tests.user_modules.build", "resources.threads_per_rank=1",
              "resources.ranks_per_node=2", "optimizer.learning_rate=0.01", *words).spec
        for words in (("sharding=ddp", "precision=O2"), ("sharding=zero1",))
    ]  # fmt: skip
    for found in on_ranks(2, frozen_since, cells[0], cells, folder=tmp_path):
        assert found == [0, 0]


class Counting(Stack):
    """Counts its training passes in an attribute, which is its extra state."""

    passes = 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(images)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Any) -> None:
        self.passes = int(state)


def test_extra_state_that_is_a_tensor_is_in_the_weights_and_comes_back() -> None:
    batch = torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)
    first, second, third = (Counting(1, 10, 16, 2) for _ in range(3))
    with vitsweep.apply("optimizer=sgd_loop", first) as applied:
        applied.step(batch)
        third.load_state_dict(applied.weights())
        state = applied.state_dict()
    with vitsweep.apply("optimizer=sgd_loop", second) as applied:
        applied.load_state_dict(state)
    assert first.passes == second.passes == third.passes == 1
