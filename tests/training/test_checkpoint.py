"""A training that is interrupted and goes on ends as if nothing had happened."""

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cells import cell
from tests.equivalence import whole_weights
from tests.ranks import on_ranks, placed
from tests.training.alone import alone, trainer_of
from vitsweep.errors import VitsweepError
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
from vitsweep.training import checkpoint
from vitsweep.training.checkpoint import Position
from vitsweep.training.checkpoint_files import (
    INFO_FILE,
    TrainingInterrupted,
    altered_file,
    checksum,
    damage,
    read_info,
    whole_checkpoints,
    write_info,
)
from vitsweep.training.checkpoint_manager import CheckpointManager, StopConsensus
from vitsweep.training.epochs import Training, train_epochs
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

TRAINING = (  # 2 epochs of 4 steps
    "task=train",
    "task.epochs=2",
    "task.warmup_epochs=1",
    "batch.images_per_step=256",
    "resources.threads_per_rank=1",
)
EXACT = ("precision.dtype=float64",)


@dataclass
class Told(Batches):
    """The batches of another, during which this rank is told to stop."""

    of: Batches
    told: Event
    before_micro_batch: int

    def __post_init__(self) -> None:
        self.num_train, self.num_test, self.given = self.of.num_train, self.of.num_test, 0

    def train(self, epoch: int, first: int = 0) -> Iterator[Any]:
        for pair in self.of.train(epoch, first):
            self.given += 1
            if self.given == self.before_micro_batch:
                self.told.set()
            yield pair

    def test(self) -> Iterator[Any]:
        return self.of.test()


def begun(spec: CellSpec, world: World) -> Trainer:
    torch.manual_seed(spec.seed)
    return parallelize(build_model(spec), spec, world)


def ending(trainer: Trainer, found: Training) -> dict[str, Any]:
    """Everything that further steps would depend on."""
    weights = whole_weights(trainer.model.named_parameters())
    kept = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in kept]
    return {
        "weights": weights,
        "optimizer": [v.clone() for v in tensors if isinstance(v, Tensor)],
        "averages": [a.clone() for a in trainer.average.averages] if trainer.average else [],
        "random": torch.get_rng_state(),
        "scale": trainer.scaler.current if trainer.scaler else None,
        "curve": [{k: v for k, v in p.items() if k != "seconds"} for p in found.curve],
    }


def both_ways(
    world: World, cells: list[CellSpec], stops: tuple[int, ...], folder: Path
) -> list[tuple[dict[str, Any], dict[str, Any], list[int]]]:
    """Train each cell at once, and with an interruption at each of `stops`, told to rank 1 only."""
    return [
        _both_ways(placed(world, spec), spec, stops, folder / str(index))
        for index, spec in enumerate(cells)
    ]


def _both_ways(
    world: World, spec: CellSpec, stops: tuple[int, ...], folder: Path
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    trainer = begun(spec, world)
    whole = ending(trainer, train_epochs(trainer, spec.data.open(spec, world)))
    steps, earlier = [], []
    for attempt, stop in enumerate((*stops, None)):
        torch.manual_seed(1000 + attempt)  # a new process knows nothing of the random state
        told = Event()
        here = folder / str(attempt)
        checkpoints = CheckpointManager(
            here, tuple(earlier[::-1]), StopConsensus(told, world.device)
        )
        batches = spec.data.open(spec, world)
        if stop is not None and world.rank == world.size - 1:
            batches = Told(batches, told, stop * spec.batch.accumulation_steps)
        trainer = begun(spec, world)
        try:
            found = train_epochs(trainer, batches, checkpoints)
        except TrainingInterrupted:
            steps.append(read_info(whole_checkpoints(here)[0]).step)
            earlier.append(here)
    return whole, ending(trainer, found), steps


def assert_same(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    assert resumed["curve"] == whole["curve"]
    assert len(whole["curve"]) == 2
    assert resumed["scale"] == whole["scale"]
    assert torch.equal(resumed["random"], whole["random"])
    assert resumed["weights"].keys() == whole["weights"].keys()
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
    for kept in ("optimizer", "averages"):
        for found, wanted in zip(resumed[kept], whole[kept], strict=True):
            assert torch.equal(found, wanted), kept


PLAINLY = [("sharding=ddp",), ("sharding=zero1",)]
EXACTLY = [
    ("sharding=ddp", "batch.accumulation_steps=2", "optimizer=sgd_loop"),
    ("sharding=fsdp", "optimizer=adamw_fused"),
    ("sharding=ddp", "optimizer=adamw_contiguous"),
]
HALF = [
    ("sharding=zero1", "precision=O2", "precision.half_dtype=bfloat16"),
    ("sharding=fsdp", "precision=O1", "precision.half_dtype=float16"),
]
MODEL_PARALLEL = [
    ("sharding=hsdp",),
    ("sharding=zero2", "optimizer=sgd_foreach"),
    ("tensor_parallel=megatron", "mesh.tensor=2"),
    ("pipeline_parallel=one_f_one_b", "mesh.pipeline=2"),
    ("sequence_parallel=ulysses", "mesh.ulysses=2", "sharding=fsdp"),
]


def interrupted(
    folder: Path, ranks: int, kinds: list[tuple[str, ...]], stops: tuple[int, ...], *more: str
) -> list[list[tuple[dict[str, Any], dict[str, Any], list[int]]]]:
    given = (*TRAINING, f"resources.ranks_per_node={ranks}", *more)
    cells = [cell(*given, *kind) for kind in kinds]
    return on_ranks(ranks, both_ways, cells[0], cells, stops, folder, folder=folder)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([*((*EXACT, *kind) for kind in EXACTLY), *HALF], marks=pytest.mark.slow),
        pytest.param([(*EXACT, *kind) for kind in PLAINLY], marks=pytest.mark.full),
    ],
    ids=["several", "plain"],
)
def test_on_two_ranks_everything_is_bitwise_the_same(
    kinds: list[tuple[str, ...]], tmp_path: Path
) -> None:
    stops = (2, 4)  # in the midst of the first epoch; of the second
    for of_rank in interrupted(tmp_path, 2, kinds, stops):
        for whole, resumed, steps in of_rank:
            assert steps == [2, 6]
            assert_same(whole, resumed)


@pytest.mark.full
def test_what_ranks_hold_of_the_model_alone_comes_back_to_them(tmp_path: Path) -> None:
    kinds = [(*EXACT, *kind) for kind in MODEL_PARALLEL]
    for of_rank in interrupted(tmp_path, 4, kinds, (3,), "model.num_heads=4"):
        for whole, resumed, steps in of_rank:
            assert steps == [3]
            assert_same(whole, resumed)


def test_a_stop_before_the_first_step_and_after_the_last_one_loses_nothing(tmp_path: Path) -> None:
    spec = alone(*EXACT, *TRAINING[:3], "batch.images_per_step=256")
    world = trainer_of(spec).world
    whole = ending(
        trainer := begun(spec, world), train_epochs(trainer, spec.data.open(spec, world))
    )
    at_once = Event()
    at_once.set()
    first = CheckpointManager(tmp_path / "1", (), StopConsensus(at_once, world.device))
    with pytest.raises(TrainingInterrupted, match="after 0 steps"):
        train_epochs(begun(spec, world), spec.data.open(spec, world), first)
    late = Event()
    second = CheckpointManager(tmp_path / "2", (tmp_path / "1",), StopConsensus(late, world.device))
    batches = Told(spec.data.open(spec, world), late, before_micro_batch=8)
    with pytest.raises(TrainingInterrupted, match="after 8 steps"):
        train_epochs(begun(spec, world), batches, second)
    seconds = read_info(whole_checkpoints(tmp_path / "2")[0]).seconds
    third = CheckpointManager(
        tmp_path / "3", (tmp_path / "2", tmp_path / "1"), StopConsensus(Event(), world.device)
    )
    trainer = begun(spec, world)
    found = train_epochs(trainer, spec.data.open(spec, world), third)
    assert_same(whole, ending(trainer, found))
    assert (found.metrics["train_seconds"] or 0) > seconds > 0


def saved(trainer: Trainer, step: int, folder: Path) -> Path:
    return checkpoint.save(trainer, Position(step, 1.0), folder)


def resuming(
    trainer: Trainer, *folders: Path, trainings: tuple[Path, ...] = ()
) -> CheckpointManager:
    stop = StopConsensus(Event(), trainer.world.device)
    return CheckpointManager(Path(), folders, stop, trainings)


def test_half_of_a_checkpoint_is_none_and_the_two_newest_are_kept(tmp_path: Path) -> None:
    """The last word is written when all tensors are: without it an earlier one counts."""
    trainer = trainer_of(alone())
    five, seven, nine = (saved(trainer, step, tmp_path) for step in (5, 7, 9))
    assert whole_checkpoints(tmp_path) == [nine, seven]
    assert not five.exists()
    (nine / INFO_FILE).unlink()
    assert whole_checkpoints(tmp_path) == [seven]
    assert resuming(trainer, tmp_path).resume(trainer).step == 7


def cut(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-100])


def lose(folder: Path) -> None:
    next(folder.glob("*.distcp")).unlink()


def overwrite(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(bytes(path.stat().st_size))


def zero_in_the_middle(folder: Path) -> None:
    """What a bad disk block leaves: everything still unpickles, and some weights are zero."""
    path = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = bytes(len(content[middle : middle + 4096]))
    path.write_bytes(content)


def of_another_type(folder: Path) -> None:
    path = folder / INFO_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": None}))


def of_one_number(folder: Path) -> None:
    (folder / INFO_FILE).write_text("7")


def garble(folder: Path) -> None:
    path = folder / ".metadata"
    path.write_bytes(b"x" * path.stat().st_size)


class Harmful:
    """A pickle that executes a command when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_what_a_foreign_checkpoint_names_is_not_executed(tmp_path: Path) -> None:
    trainer = trainer_of(alone())
    saved(trainer, 5, tmp_path)
    folder = saved(trainer, 7, tmp_path)
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(Harmful(tmp_path / "executed")))
    info = json.loads((folder / INFO_FILE).read_text())
    info["files"][".metadata"] = path.stat().st_size
    info["checksums"][".metadata"] = checksum(path)
    (folder / INFO_FILE).write_text(json.dumps(info))
    assert resuming(trainer, tmp_path).resume(trainer).step == 5
    assert not (tmp_path / "executed").exists()


def halve(folder: Path) -> None:
    path = folder / INFO_FILE
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, r"bytes instead of"),
        (lose, r"file .* missing"),
        (overwrite, r"other bytes"),
        (zero_in_the_middle, r"distcp .*other bytes"),
        (garble, r"\.metadata .*other bytes"),
        (halve, r"trained\.json .*read"),
        (of_another_type, r"trained\.json .*\(`files`: "),
        (of_one_number, r"trained\.json .*read"),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_is_used_and_it_is_reported(
    tmp_path: Path, harm: Callable[[Path], None], said: str
) -> None:
    trainer = trainer_of(alone())
    saved(trainer, 5, tmp_path)
    whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1)
    harm(saved(trainer, 7, tmp_path))

    again = trainer_of(alone("seed=3"))
    checkpoints = resuming(again, tmp_path)
    assert checkpoints.resume(again).step == 5
    assert " 5 steps. " in checkpoints.resumed
    assert re.search(rf"step-000000007.*{said}", checkpoints.resumed), checkpoints.resumed
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, whole[name])


def test_ranks_share_the_reading_of_a_checkpoints_files(tmp_path: Path) -> None:
    """It costs each of them a part: one finds the damage, and `first_of_all_ranks` tells the others."""
    folder = saved(trainer_of(alone()), 5, tmp_path)
    parts = len(read_info(folder).files)
    assert parts >= 2
    assert not any(altered_file(folder, part, parts) for part in range(parts))
    zero_in_the_middle(folder)
    assert damage(folder) == ""
    assert [bool(altered_file(folder, part, parts)) for part in range(parts)].count(True) == 1


def test_a_checkpoint_from_before_there_were_checksums_is_used(tmp_path: Path) -> None:
    trainer = trainer_of(alone())
    folder = saved(trainer, 5, tmp_path)
    document = json.loads((folder / INFO_FILE).read_text())
    del document["checksums"]
    (folder / INFO_FILE).write_text(json.dumps(document))
    assert resuming(trainer, tmp_path).resume(trainer).step == 5


def test_the_checkpoint_of_another_model_is_passed_over(tmp_path: Path) -> None:
    saved(trainer_of(alone("model.mlp_width=128")), 9, tmp_path / "width")
    saved(trainer_of(alone("model.depth=1")), 9, tmp_path / "depth")
    trainer = trainer_of(alone())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    checkpoints = resuming(trainer, trainings=(tmp_path / "width", tmp_path / "depth"))

    assert checkpoints.resume(trainer) == Position()
    assert "`blocks.0.mlp.up.weight`" in (checkpoints.resumed)
    assert "`blocks.1" in checkpoints.resumed
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_training_without_another_checkpoint_does_not_go_on_with_half_of_one(
    tmp_path: Path,
) -> None:
    trainer = trainer_of(alone())
    folder = saved(trainer, 5, tmp_path)
    overwrite(folder)
    write_info(folder, replace(read_info(folder), checksums={}))  # written before there were any
    with pytest.raises(VitsweepError, match=f"{folder.name}`"):
        resuming(trainer, tmp_path).resume(trainer)


def periodic(
    world: World, cells: list[CellSpec], folder: Path
) -> list[tuple[dict[str, Any], dict[str, Any], list[int]]]:
    """Train each cell with a checkpoint before every step, and go on from one of the last."""
    return [_periodic(placed(world, spec), spec, folder / str(i)) for i, spec in enumerate(cells)]


def _periodic(
    world: World, spec: CellSpec, folder: Path
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    trainer = begun(spec, world)
    stop = StopConsensus(Event(), world.device)
    checkpoints = CheckpointManager(folder / "1", (), stop, every_seconds=0.0)
    whole = ending(trainer, train_epochs(trainer, spec.data.open(spec, world), checkpoints))
    dist.barrier()
    steps = [read_info(path).step for path in whole_checkpoints(folder / "1")]
    torch.manual_seed(77)
    trainer = begun(spec, world)
    killed = CheckpointManager(folder / "2", (), stop, trainings=(folder / "1",))
    found = train_epochs(trainer, spec.data.open(spec, world), killed)
    return whole, ending(trainer, found), steps


@pytest.mark.full
def test_a_checkpoint_that_training_waits_for_holds_its_own_step(
    tmp_path: Path,
) -> None:
    """A killed run leaves nothing else: its training ends as if it had not been killed."""
    kinds = [
        (*EXACT, "sharding=ddp"),
        (*EXACT, "sharding=fsdp", "optimizer=adamw_fused"),
        (*EXACT, "sharding=zero1", "recipe.mixup_alpha=0.8", "recipe.rand_augment_ops=2",
         "recipe.rand_augment_magnitude=9.0", "recipe.drop_path=0.2"),
    ]  # fmt: skip
    given = (*TRAINING, "resources.ranks_per_node=2")
    cells = [cell(*given, *kind) for kind in kinds]
    for of_rank in on_ranks(2, periodic, cells[0], cells, tmp_path, folder=tmp_path):
        for whole, resumed, steps in of_rank:
            assert 1 <= len(steps) <= 2
            assert 0 < steps[0] < 8
            assert_same(whole, resumed)
