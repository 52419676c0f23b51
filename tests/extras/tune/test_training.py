"""One real training with six settings, two of them slow and two of them bad, beside five seeds without."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitsweep
from tests.extras.guard.test_check import cell_of
from tests.extras.tune.test_tune import apart, build, out_of_memory
from tests.ranks import on_ranks
from vitsweep.extras.guard import planted
from vitsweep.extras.tune import tune as tuning
from vitsweep.world import World

SETTINGS = [
    f"{each} resources.threads_per_rank=1"
    for each in (
        "sharding=ddp optimizer=adamw_loop",
        "sharding=ddp optimizer=adamw_foreach",
        "sharding=zero1 precision=O1",
        "sharding=fsdp precision=O2",
        "sharding=ddp optimizer=adamw_fused",
        "sharding=zero2",
    )
]
SLOW, LARGE, WRONG = SETTINGS[2:4], SETTINGS[4], SETTINGS[5]
EQUAL = [
    f"sharding=ddp runtime={each} resources.threads_per_rank=1"
    for each in ("plain", "gc_scheduled", "gc_automatic")
]
LAST = 100


def batch(step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images whose class is that of the largest of ten fixed projections."""
    generator = torch.Generator().manual_seed(10_000 * seed + 2 * step + rank)
    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(5))
    images = torch.randn(8, 1, 8, 8, generator=generator)
    return images, (images.flatten(1) @ teacher).argmax(1)


def trained(world: World, training: Any, steps: int, seed: int) -> dict[str, Any]:
    losses, begun = [], time.monotonic()
    for step in range(steps):
        for group in training.optimizer.param_groups:
            group["lr"] = 0.003 * (1 - step / steps)
        losses.append(training.step(batch(step, world.rank, seed)))
    took = time.monotonic() - begun
    loss = torch.stack(losses[-LAST:]).mean()
    torch.distributed.all_reduce(loss)
    return {"seconds": took, "loss": float(loss) / world.size, "weights": training.weights()}


def alone(world: World, settings: str, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    with vitsweep.apply(settings, build()) as training:
        return trained(world, training, steps, seed)


def slowed(training: Any) -> None:
    """Let forward and backward pass last twice as long."""
    model, begun = training.model, [0.0]

    def begin(*_: Any) -> None:
        begun[0] = time.monotonic()

    def wait(*_: Any) -> None:
        time.sleep(3 * (time.monotonic() - begun[0]))

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(wait)


def in_turns(world: World, steps: int, watched: bool, record: str) -> dict[str, Any]:
    """Train with all settings; where it is watched, switches go back, and each block begins with a check."""
    said, verdicts, moves, apart_after = [], [], 0, []
    torch.manual_seed(0)
    move, take_over = tuning.move, tuning.Tuner._take_over

    def moved(source: Any, to: Any) -> None:
        nonlocal moves
        moves += 1
        move(source, to)
        held = {k: t.clone() for k, t in tuning_state(source).items()}
        move(to, source)
        apart_after.extend(apart(held, tuning_state(source)))

    def taken_over(tuner: Any, name: str, given: Any) -> None:
        take_over(tuner, name, given)
        verdicts.append(vitsweep.check(tuner._trainings[name], given).verdict)

    if watched:
        tuning.move, tuning.Tuner._take_over = moved, taken_over  # type: ignore[method-assign]
    with vitsweep.tune(
        SETTINGS, build, tune_steps=steps, record=record, on_news=said.append
    ) as tuner:
        for name in SLOW:
            slowed(tuner._trainings[name])
        out_of_memory(tuner._trainings[LARGE])
        with planted.scaled_gradients(tuner._trainings[WRONG], rank=1):
            found = trained(world, tuner, steps, 0)
    out = {"said": said, "verdicts": verdicts, "moves": moves, "apart": apart_after}
    return found | out | {"left_out": tuner.left_out, "stays": tuner.stays}


def tuning_state(trainer: Any) -> dict[str, Tensor]:
    return tuning_state_of(tuning.shards_of_training(trainer))


def tuning_state_of(shards: Any) -> dict[str, Tensor]:
    return {f"{s.name}@{s.offsets}": s.values for s in shards}


@pytest.mark.full  # some thousand steps on two ranks
@pytest.mark.parametrize("watched", [True, False])
def test_a_training_with_six_settings_ends_as_one_without(watched: bool, tmp_path: Path) -> None:
    steps, cell = 2000, cell_of("stack", ("sharding=ddp",), 2)
    record = str(tmp_path / "tune.jsonl")
    found, _ = on_ranks(2, in_turns, cell, steps, watched, record, folder=tmp_path)
    seeds = [on_ranks(2, alone, cell, SETTINGS[0], steps, s, folder=tmp_path)[0] for s in range(5)]
    losses = [each["loss"] for each in seeds]
    print("\n".join(found["said"]))
    print(f"loss {found['loss']:.4f} beside {losses}; {found['seconds']:.1f} s beside")
    print([round(each["seconds"], 1) for each in seeds], found["moves"], "switches")
    assert abs(found["loss"] - losses[0]) < max(losses) - min(losses)
    assert found["stays"] not in (*SLOW, LARGE, WRONG)
    assert "OutOfMemoryError" in found["left_out"][LARGE]
    assert "FaultFoundError" in found["left_out"][WRONG]
    assert found["apart"] == []
    assert set(found["verdicts"]) <= {"sound"}


def equal_kernels(world: World, steps: int) -> list[str]:
    torch.manual_seed(0)
    with vitsweep.tune(EQUAL, build, tune_steps=steps, on_news=str) as tuner:
        found = trained(world, tuner, steps + 20, 0)
    return apart(found["weights"], alone(world, EQUAL[0], steps + 20, 0)["weights"])


@pytest.mark.parametrize("steps", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_settings_with_equal_kernels_train_as_one_bit_for_bit(steps: int, tmp_path: Path) -> None:
    cell = cell_of("stack", ("sharding=ddp",), 2)
    assert on_ranks(2, equal_kernels, cell, steps, folder=tmp_path) == [[], []]
