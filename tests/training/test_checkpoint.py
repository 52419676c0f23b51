"""A training that is interrupted and goes on ends as if nothing had happened."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
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
from vitsweep.training.checkpoint_files import INFO_FILE, TrainingInterrupted, newest, read_info
from vitsweep.training.checkpoint_manager import CheckpointManager
from vitsweep.training.epochs import train_epochs
from vitsweep.training.stop_consensus import StopConsensus
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


def ending(trainer: Trainer, found: dict[str, float]) -> dict[str, Any]:
    """Everything that further steps would depend on."""
    weights = whole_weights(trainer.model.named_parameters())
    kept = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in kept]
    return {
        "weights": weights,
        "optimizer": [v.clone() for v in tensors if isinstance(v, Tensor)],
        "random": torch.get_rng_state(),
        "scale": trainer.scaler.current if trainer.scaler else None,
        "accuracy": found["accuracy_top1"],
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
            steps.append(read_info(here).step)
            earlier.append(here)
    return whole, ending(trainer, found), steps


def assert_same(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    assert resumed["accuracy"] == whole["accuracy"]
    assert resumed["scale"] == whole["scale"]
    assert torch.equal(resumed["random"], whole["random"])
    assert resumed["weights"].keys() == whole["weights"].keys()
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name
    assert len(resumed["optimizer"]) == len(whole["optimizer"])
    for found, wanted in zip(resumed["optimizer"], whole["optimizer"], strict=True):
        assert torch.equal(found, wanted)


EXACTLY = [
    ("sharding=ddp",),
    ("sharding=ddp", "batch.accumulation_steps=2", "optimizer=sgd_loop"),
    ("sharding=zero1",),
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


@pytest.mark.slow
def test_on_two_ranks_everything_is_bitwise_the_same(tmp_path: Path) -> None:
    stops = (2, 4)  # in the midst of the first epoch; of the second
    for of_rank in interrupted(tmp_path, 2, [(*EXACT, *kind) for kind in EXACTLY] + HALF, stops):
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
    seconds = read_info(tmp_path / "2").seconds
    third = CheckpointManager(
        tmp_path / "3", (tmp_path / "2", tmp_path / "1"), StopConsensus(Event(), world.device)
    )
    trainer = begun(spec, world)
    found = train_epochs(trainer, spec.data.open(spec, world), third)
    assert_same(whole, ending(trainer, found))
    assert found["train_seconds"] > seconds > 0


def test_another_world_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(alone())
    checkpoint.save(trainer, 5, 1.0, tmp_path)
    other = trainer_of(alone())
    shape = replace(other.world.shape, replicate=2)
    other.world = replace(other.world, size=2, shape=shape)
    with pytest.raises(VitsweepError, match=r"saved by 1 ranks .* this run has 2 .*replicate=2"):
        checkpoint.load(other, tmp_path)


def test_half_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    """The last word is written when all tensors are: without it an earlier one counts."""
    checkpoint.save(trainer_of(alone()), 5, 1.0, tmp_path / "1")
    checkpoint.save(trainer_of(alone()), 7, 1.0, tmp_path / "2")
    folders = (tmp_path / "2", tmp_path / "1")
    assert newest(folders, INFO_FILE) == tmp_path / "2"
    (tmp_path / "2" / INFO_FILE).unlink()
    assert newest(folders, INFO_FILE) == tmp_path / "1"
