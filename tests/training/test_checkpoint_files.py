"""Which checkpoints there are, what is wrong with them, and when ranks save: files and clocks by hand."""

import errno
import json
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.cells_and_worlds import world
from tests.refusals import named
from tests.training.alone import alone, batch, trainer_of
from vitsweep.errors import VitsweepError
from vitsweep.training import checkpoint, checkpoint_manager
from vitsweep.training.checkpoint import (
    Position,
    _kinds,
    allocate_state,
    complete_loading,
    numbers,
    saved_by,
)
from vitsweep.training.checkpoint_files import (
    CHECKPOINT_FOLDER,
    INFO_FILE,
    SHOWN,
    CheckpointInfo,
    altered_file,
    checkpoints_in,
    checksum,
    course,
    damage,
    drop_old_checkpoints,
    other_course,
    step_folder,
    whole_checkpoints,
    write_info,
)
from vitsweep.training.checkpoint_manager import (
    CheckpointManager,
    Decision,
    StopConsensus,
    WeightKeeper,
)

CPU = torch.device("cpu")


def info(**given: Any) -> CheckpointInfo:
    plain: dict[str, Any] = {
        "step": 4,
        "seconds": 1.0,
        "world_size": 1,
        "mesh": {},
        "sharding": "none",
    }
    return CheckpointInfo(**(plain | {"course": {}, "scaler": {}, "groups": []} | given))


def made(training: Path, *steps: int, **given: Any) -> list[Path]:
    folders = [step_folder(training, step) for step in steps]
    for folder in folders:
        folder.mkdir(parents=True)
        write_info(folder, info(**given))
    return folders


def test_the_two_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    first, second, third = made(tmp_path, 4, 12, 100)
    step_folder(tmp_path, 200).mkdir()  # of which no info file was written
    assert whole_checkpoints(tmp_path) == [third, second, first]
    drop_old_checkpoints(tmp_path)
    assert whole_checkpoints(tmp_path) == [third, second]
    assert not first.exists()
    assert step_folder(tmp_path, 200).exists()
    drop_old_checkpoints(tmp_path)
    assert whole_checkpoints(tmp_path) == [third, second]


def test_damage_shows_by_sizes_and_other_bytes_by_checksums(tmp_path: Path) -> None:
    [folder] = made(tmp_path, 4)
    sums = {}
    for name in "abc":
        (folder / name).write_bytes(name.encode() * 5)
        sums[name] = zlib.crc32(name.encode() * 5)
        assert checksum(folder / name) == sums[name]
    write_info(folder, info(files=dict.fromkeys("abc", 5), checksums=sums))
    assert damage(folder) == altered_file(folder) == ""
    (folder / "b").write_bytes(b"bbbbx")
    assert damage(folder) == ""
    assert "file b" in altered_file(folder)
    assert [bool(altered_file(folder, part, 3)) for part in range(3)] == [False, True, False]
    assert [bool(altered_file(folder, part, 2)) for part in range(2)] == [False, True]
    (folder / "b").write_bytes(b"bbbb")
    assert {"4", "5"} <= set(damage(folder).split())
    (folder / "b").unlink()
    assert "b is missing" in damage(folder)
    assert altered_file(folder)
    (folder / INFO_FILE).write_text(json.dumps(asdict(info()) | {"step": "x"}))
    assert damage(folder) != ""
    (folder / INFO_FILE).write_text(json.dumps(asdict(info()) | {"later": 1}))
    assert damage(folder) != ""


def test_a_checkpoint_stands_for_older_ones_and_a_folder_for_all_in_it(tmp_path: Path) -> None:
    cell = tmp_path / "cell"
    first, second, third = made(cell / "attempts" / "a.1" / CHECKPOINT_FOLDER, 4, 8, 12)
    [fourth] = made(cell / "attempts" / "b.1" / CHECKPOINT_FOLDER, 10)
    assert checkpoints_in(str(second)) == [second, first]
    assert checkpoints_in(str(third.parent)) == [third, second, first]
    assert checkpoints_in(str(third.parent.parent)) == [third, second, first]
    assert checkpoints_in(str(cell)) == [third, fourth, second, first]
    assert checkpoints_in(str(tmp_path)) == []


def test_another_course_names_its_first_settings(tmp_path: Path) -> None:
    spec = alone("task=train", "task.epochs=2")
    own = course(spec)
    assert {
        "seed",
        "task.epochs",
        "images_per_step",
        "batch.resolution_px",
        "optimizer.beta1",
    } <= own.keys()
    assert not {"sharding", "precision", "optimizer.name", "data.num_workers"} & own.keys()
    assert {"vit_block", "tokens"} <= course(
        alone("task=train", "tokens=drop", "vit_block=drop_samples")
    ).keys()
    [same] = made(tmp_path / "same", 4, course=own)
    assert other_course(spec, same) == ""
    changed = {f"model.key{index}": index for index in range(SHOWN + 1)}
    [other] = made(tmp_path / "other", 4, course=own | changed)
    told = other_course(spec, other)
    assert [f"model.key{index}=" in told for index in range(SHOWN + 1)] == [True] * SHOWN + [False]


def test_ranks_stop_before_they_save_and_save_before_they_go_on() -> None:
    requested = Event()
    stop = StopConsensus(requested, CPU)
    assert stop.agreed() == Decision.go_on
    assert stop.agreed(save_due=True) == Decision.save
    assert stop.agreed() == Decision.go_on
    requested.set()
    assert stop.agreed() == stop.agreed(save_due=True) == Decision.stop
    requested.clear()
    assert stop.agreed(at_once=True) == Decision.go_on


def test_on_a_gpu_an_answer_is_that_to_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopConsensus(Event(), torch.device("meta"))
    monkeypatch.setattr(stop, "_reduce", lambda wish: lambda: int(wish))
    wishes = [stop.agreed(save_due=due) for due in (True, False, False)]
    assert wishes == [Decision.go_on, Decision.save, Decision.go_on]
    assert stop.agreed(save_due=True, at_once=True) == Decision.save
    assert stop.agreed() == Decision.go_on


def test_a_checkpoint_is_due_after_its_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint_manager.time, "monotonic", lambda: 100.0)
    for seconds, saved_at, is_due in ((10.0, 90.0, True), (10.0, 90.1, False), (None, 0.0, False)):
        own = CheckpointManager(tmp_path, (), StopConsensus(Event(), CPU), every_seconds=seconds)
        own._saved_at = saved_at
        assert own.decide() == (Decision.save if is_due else Decision.go_on)


def test_the_measurement_of_the_newest_earlier_attempt_counts(tmp_path: Path) -> None:
    folders = tuple(tmp_path / name for name in ("new", "middle", "old"))
    for folder in folders:
        folder.mkdir()
    stop = StopConsensus(Event(), CPU)
    later = CheckpointManager(tmp_path, folders, stop)
    assert later.load_measurement() is None
    for folder, number in zip(folders[1:], (2, 3), strict=True):
        CheckpointManager(folder, (), stop).save_measurement({"steps": number}, world())
        CheckpointManager(folder, (), stop).save_measurement({"steps": 9}, world(1, shard=2))
    assert later.load_measurement() == {"steps": 2}


def test_who_saved_a_checkpoint_is_reported_where_it_is_another_world(tmp_path: Path) -> None:
    trainer = trainer_of(alone())
    mesh = asdict(trainer.world.shape)
    [same] = made(tmp_path / "a", 4, mesh=mesh)
    assert saved_by(same, trainer) == ""
    [other] = made(tmp_path / "b", 4, mesh=mesh | {"shard": 4}, world_size=4, sharding="fsdp")
    told = saved_by(other, trainer)
    assert "4 ranks (sharding=fsdp, shard=4)" in told
    assert "1 rank (sharding=none)" in told
    [sharded] = made(tmp_path / "c", 4, mesh=mesh, sharding="ddp")
    assert saved_by(sharded, trainer) != ""


def test_entries_of_groups_are_saved_with_their_types_or_named(tmp_path: Path) -> None:
    trainer = trainer_of(alone())
    rate = torch.tensor(0.1)
    given = {"lr": np.float64(0.1), "betas": (np.float32(0.5), 0.9), "rate": rate, "nesterov": np.True_,
             "words": ["a", None], "scales": {"head": (1, 2.0), 3: np.array(4)}}  # fmt: skip
    wanted = {"lr": 0.1, "betas": (0.5, 0.9), "rate": rate, "nesterov": True,
              "words": ["a", None], "scales": {"head": (1, 2.0), 3: 4}}  # fmt: skip
    group = trainer.optimizer.param_groups[0]
    group.update(given)
    checkpoint.save(trainer, Position(step=1), tmp_path)
    [folder] = whole_checkpoints(tmp_path)
    group.update(dict.fromkeys(given, 9))
    checkpoint.load(trainer, folder)
    for key, value in wanted.items():
        assert group[key] == value
        assert repr(group[key]) == repr(value)  # with all types inside
    group["scales"]["of"] = lambda: 1
    for call in (numbers, lambda trainer: CheckpointManager(tmp_path, (), None).resume(trainer)):
        with pytest.raises(VitsweepError) as refused:
            call(trainer)
        assert "`optimizer.param_groups[0]['scales']`" in named(str(refused.value))


def test_state_that_was_not_saved_is_dropped_and_groups_get_their_numbers() -> None:
    trainer = trainer_of(alone())
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    allocate_state(trainer.optimizer)
    names = {place for group in trainer.optimizer.param_groups for place in group["names"]}
    assert len(trainer.optimizer.state) == len(names)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == rates
    saved = [f"optimizer.exp_avg.{name}" for name in names if name != "head.bias"]
    own = numbers(trainer)["groups"]
    assert len(own) == 2
    assert "params" not in own[0]
    complete_loading(trainer, saved, {}, [own[0] | {"lr": 0.25}, own[1] | {"lr": 0.5}])
    assert len(trainer.optimizer.state) == len(names) - 1
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.25, 0.5]
    complete_loading(trainer, saved, {}, [{"step": 7, "lr": 9.0}])
    assert [(g["lr"], g["step"]) for g in trainer.optimizer.param_groups] == [(0.25, 7), (0.5, 7)]
    assert _kinds(["optimizer.exp_avg.a.b", "optimizer.step.a", "model.exp.a"]) == {
        "exp_avg",
        "step",
    }
    assert Position() == Position(0, 0.0, ())


def test_weights_that_are_kept_are_named_or_the_reason_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cells" / "c" / "attempts" / "b-1.1"
    folder.mkdir(parents=True)
    trainer = trainer_of(alone("averaging=ema"))
    trainer.step(iter([batch()]))
    last = {"epoch": 2.0, "accuracy_top1": 0.5, "seconds": 1.0}
    none = WeightKeeper(folder, "none")
    none.finish(trainer, last)
    assert (none.facts(), list(folder.iterdir())) == ({}, [])
    kept = WeightKeeper(folder, "weights")
    kept.finish(trainer, last)
    assert kept.facts() == {"weights_file": "cells/c/attempts/b-1.1/weights.safetensors"}
    assert sorted(p.name for p in folder.iterdir()) == [
        "weights.safetensors",
        "weights_averaged.safetensors",
    ]
    content = (folder / "weights.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {
        "format": "pt",
        "cell": "c",
        "epoch": "2.0",
        "accuracy_top1": "0.5",
    }

    def full(path: Path, content: bytes, *, durable: bool) -> None:
        raise OSError(number, "full")

    monkeypatch.setattr(checkpoint_manager, "write_atomically", full)
    number = errno.ENOSPC
    kept.finish(trainer, last)
    assert kept.facts().keys() == {"weights_reason"}
    number = errno.EINVAL
    with pytest.raises(OSError, match="full"):
        kept.finish(trainer, last)
    other: Any = SimpleNamespace(world=replace(trainer.world, rank=1))
    kept._save("x", {}, other.world.rank, {})
