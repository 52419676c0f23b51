"""Several ranks: state moves between shardings bit for bit, and a rank that fails ends all with one error."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import vitsweep
from tests.extras.guard.test_check import MODELS, cell_of
from tests.extras.tune.test_tune import batches, build, out_of_memory, trained
from tests.ranks import RankFailedError, on_ranks
from vitsweep.errors import VitsweepError
from vitsweep.extras.take_home.moved import move
from vitsweep.extras.tune import tune as tuning
from vitsweep.extras.tune import vote
from vitsweep.world import World

SIDES = (
    ("sharding=ddp", "optimizer=adamw_contiguous"),
    ("sharding=fsdp", "precision=O2", "optimizer=adamw_fused"),
    ("sharding=zero1", "precision=O2", "precision.half_dtype=float16"),
    ("sharding=zero2", "batch.accumulation_steps=1", "memory=recompute_blocks"),
)
"""Settings that keep the same state in four ways."""


def moved_there_and_back(world: World, model: str, choices: Any) -> list[str]:
    """Return what differs after a way through all settings, with a step under each before."""
    made, found = MODELS[model], []
    with ExitStack() as open_trainings:
        trainings = []
        for choice in choices:
            torch.manual_seed(0)
            typed = " ".join([*choice, "resources.threads_per_rank=1 averaging=ema"])
            trainings.append(open_trainings.enter_context(vitsweep.apply(typed, made())))
        trained(trainings[0], batches(2, world.rank))
        for first, second in zip(trainings, [*trainings[1:], trainings[0]], strict=True):
            trained(first, batches(2, world.rank), 2)
            before = first.state_dict()
            move(first.trainer, second.trainer)
            assert second.trainer.steps_taken == first.trainer.steps_taken
            for group in first.optimizer.param_groups:
                group["lr"] = 77.0
            trained(first, batches(1, world.rank))  # so that nothing can come back by itself
            move(second.trainer, first.trainer)
            after = first.state_dict()
            assert before.pop("scaler").keys() == after.pop("scaler").keys()
            tensors, wanted = after.pop("tensors"), before.pop("tensors")
            found += [n for n, t in wanted.items() if not torch.equal(t, tensors[n])]
            found += [] if after == before else [f"{after} is not {before}"]
            found += [] if tensors.keys() == wanted.keys() else ["other tensors"]
    return found


@pytest.mark.parametrize("model", ["normed", "stack"])
def test_state_moves_there_and_back_bit_for_bit(model: str, tmp_path: Path) -> None:
    cell = cell_of("stack", (), 2)
    assert on_ranks(2, moved_there_and_back, cell, model, SIDES, folder=tmp_path) == [[], []]


STEPS, SAVED = 20, 4
SETTINGS = [
    f"{each} sharding=ddp resources.threads_per_rank=1"
    for each in ("runtime=plain", "runtime=gc_scheduled")
]


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise RuntimeError("no kernel image is available")


def trained_until_a_rank_fails(world: World, how: str, folder: str) -> None:
    """Save the state after a block; let rank 1 fail at the next switch, and save what the others get."""
    tuning.BLOCK_STEPS, vote.GRACE_S = SAVED, 2.0
    steps, path = batches(STEPS, world.rank), Path(folder) / f"state-{world.rank}.pt"
    torch.manual_seed(0)
    with vitsweep.tune(SETTINGS, build, on_news=str) as tuner:
        trained(tuner, steps[:SAVED])
        torch.save(tuner.state_dict(), path)
        if world.rank == 1 and how == "killed":
            tuning.move = kill  # type: ignore[assignment]
        if world.rank == 1 and how == "raises":
            [new] = {*tuner._trainings} - {tuner.setting}
            tuner._trainings[new].model.register_forward_pre_hook(fail)
        if how == "alike":
            [new] = {*tuner._trainings} - {tuner.setting}
            out_of_memory(tuner._trainings[new])
            trained(tuner, steps[SAVED:], SAVED)
            torch.save(tuner.state_dict(), path)
            return
        try:
            trained(tuner, steps[SAVED:], SAVED)
        except VitsweepError as error:
            torch.save(tuner.state_dict(), path)
            path.with_suffix(".txt").write_text(str(error))
        os._exit(1)  # as a script that ends with an error


def resumed(world: World, folder: str) -> Any:
    tuning.BLOCK_STEPS = SAVED
    steps = batches(STEPS, world.rank)
    with vitsweep.tune(SETTINGS, build, tune_steps=STEPS, on_news=str) as tuner:
        state = torch.load(Path(folder) / f"state-{world.rank}.pt")
        tuner.load_state_dict(state)
        done = state["training"]["step"]
        found = trained(tuner, steps[done:], done)
        return done, [*tuner.left_out], tuner.stays, found


def whole(world: World) -> Any:
    torch.manual_seed(0)
    with vitsweep.apply(SETTINGS[0], build()) as training:
        return trained(training, batches(STEPS, world.rank))


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_where_some_ranks_fail_all_end_with_one_error_and_a_resume_works(
    how: str, tmp_path: Path
) -> None:
    cell, folder = cell_of("stack", ("sharding=ddp",), 3), str(tmp_path)
    with pytest.raises(RankFailedError):
        on_ranks(3, trained_until_a_rank_fails, cell, how, folder, folder=tmp_path)
    said = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert len(said) == (3 if how == "raises" else 2)
    [error] = {*said.values()}
    assert "failed on some ranks and not on all alike" in error
    assert ("RuntimeError on rank 1: no kernel image is available" in error) == (how == "raises")
    answers = on_ranks(3, resumed, cell, folder, folder=tmp_path)
    wanted = on_ranks(3, whole, cell, folder=tmp_path)
    for (done, out, stays, found), weights in zip(answers, wanted, strict=True):
        assert done == SAVED
        assert (stays in SETTINGS, len(out)) == (True, 1)
        assert [n for n, t in weights.items() if not torch.equal(t, found[n])] == []


def test_a_setting_that_fails_on_all_ranks_alike_is_out(tmp_path: Path) -> None:
    cell, folder = cell_of("stack", ("sharding=ddp",), 2), str(tmp_path)
    assert on_ranks(2, trained_until_a_rank_fails, cell, "alike", folder, folder=tmp_path) == [
        None,
        None,
    ]
    states = [torch.load(tmp_path / f"state-{rank}.pt") for rank in (0, 1)]
    first, second = ([*state["left_out"].values()] for state in states)
    assert first == second
    assert len(first) == 1
    assert re.fullmatch(r"OutOfMemoryError on rank [01]: Tried to allocate 80.00 GiB.", first[0])
