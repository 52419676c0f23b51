"""A training goes on with other ranks, shardings and meshes, from the same images and state."""

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import TINY, entry
from tests.ranks import on_ranks, placed
from tests.refusals import require
from tests.training.alone import alone, trainer_of
from tests.training.test_checkpoint import TRAINING, Told, begun
from vitsweep.errors import VitsweepError
from vitsweep.proof.twin import mean_over_replicas
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training import checkpoint
from vitsweep.training.checkpoint import Position
from vitsweep.training.checkpoint_files import (
    INFO_FILE,
    TrainingInterrupted,
    other_course,
)
from vitsweep.training.checkpoint_manager import CheckpointManager, StopConsensus
from vitsweep.training.epochs import train_epochs
from vitsweep.training.shards import boxes
from vitsweep.world import World

STOP = 3
Learned = tuple[list[float], list[float]]
ADAMW = "optimizer=adamw_fused"
MUON = ("optimizer=muon", "averaging=ema")


def asked(ranks: int, *overrides: str) -> CellSpec:
    planned = entry(
        *TINY, *TRAINING, f"resources.ranks_per_node={ranks}", "model.depth=4", *overrides
    )
    assert not planned.reasons
    return planned.spec


def begin(world: World, cells: Sequence[CellSpec], folder: Path) -> list[Learned]:
    """Train each cell to its end, and again until it is told to stop; return what the first learned."""
    found = []
    for index, spec in enumerate(cells):
        here = placed(world, spec)
        learned = learned_by(spec, here, None)
        told = Event()
        manager = CheckpointManager(folder / str(index), (), StopConsensus(told, here.device))
        batches = Told(spec.data.open(spec, here), told, STOP * spec.batch.accumulation_steps)
        with pytest.raises(TrainingInterrupted):
            train_epochs(begun(spec, here), batches, manager)
        found.append(learned)
    return found


def go_on(world: World, cells: Sequence[CellSpec], folders: Sequence[Path]) -> list[Any]:
    """Train each cell from a checkpoint to its end; return what it learned and what was resumed."""
    found = []
    for spec, folder in zip(cells, folders, strict=True):
        here = placed(world, spec)
        manager = CheckpointManager(
            folder / "own", (), StopConsensus(Event(), here.device), resume_from=str(folder)
        )
        found.append((learned_by(spec, here, manager), manager.resumed))
    return found


def learned_by(spec: CellSpec, world: World, manager: CheckpointManager | None) -> Learned:
    """Return the mean loss over all replicas of every step, and the accuracies after the epochs."""
    trainer = begun(spec, world)
    losses, step = [], trainer.step

    def noted(*arguments: Any) -> Tensor:
        loss = step(*arguments)
        losses.append(mean_over_replicas(loss, world))
        return loss

    trainer.step = noted  # type: ignore[method-assign]
    found = train_epochs(trainer, spec.data.open(spec, world), manager)
    return losses, [point["accuracy_top1"] for point in found.curve]


def check(
    tmp_path: Path, writers: list[CellSpec], readers: list[tuple[int, CellSpec]], tolerance: float
) -> list[Learned]:
    """Let each reader go on from the checkpoint of a writer, given by its index.

    Return what the writers learned.
    """
    ranks = writers[0].resources.world_size
    wanted = on_ranks(ranks, begin, writers[0], writers, tmp_path, folder=tmp_path)[0]
    folders = [tmp_path / str(index) for index, _ in readers]
    cells = [spec for _, spec in readers]
    ranks = cells[0].resources.world_size
    found = on_ranks(ranks, go_on, cells[0], cells, folders, folder=tmp_path)[0]
    for (index, spec), ((losses, accuracies), resumed) in zip(readers, found, strict=True):
        what = f"{index} -> {spec.sharding.name} {spec.mesh}"
        assert f" {STOP} steps" in resumed, what
        all_losses, all_accuracies = wanted[index]
        assert len(all_losses) == 8
        assert all_losses[0] > 1.01 * all_losses[-1], "it must have learned something"
        assert losses == pytest.approx(all_losses[STOP:], rel=tolerance, abs=0), what
        assert accuracies == pytest.approx(all_accuracies, abs=max(tolerance, 1e-6)), what
    return wanted


EXACT = "precision.dtype=float64"
SMALL = (EXACT, "model.depth=2")


@pytest.mark.slow
def test_two_ranks_go_on_under_other_shardings(tmp_path: Path) -> None:
    """float64, so that a wrong slice of state cannot hide in the rounding."""
    writers = [
        asked(2, *SMALL, "sharding=ddp", "optimizer=adamw_contiguous"),
        asked(2, *SMALL, "sharding=zero1", ADAMW, "layout.channels_last=true"),
        asked(2, *SMALL, "tensor_parallel=megatron", "mesh.tensor=2", "sharding=ddp", ADAMW),
        asked(2, *SMALL, "sharding=zero1", *MUON),
    ]
    ema = [asked(2, *SMALL, ADAMW, "averaging=ema", f"sharding={s}") for s in ("ddp", "fsdp")]
    zero1 = asked(2, *SMALL, "sharding=zero1", ADAMW)
    fsdp = asked(2, *SMALL, "sharding=fsdp", "optimizer=adamw_foreach")
    muon = asked(2, *SMALL, "sharding=fsdp", *MUON)
    readers = [(0, zero1), (1, fsdp), (2, zero1), (2, fsdp), (3, muon)]
    *_, of_ddp, of_fsdp = check(tmp_path, [*writers, *ema], readers, 1e-9)
    # evaluating the averaged weights changes no step under FSDP
    assert of_fsdp[0] == pytest.approx(of_ddp[0], rel=1e-9, abs=0)
    assert of_fsdp[1] == of_ddp[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "writer",
    [
        ("sharding=ddp",),
        ("sharding=zero1", "averaging=ema"),
        ("sharding=fsdp", "optimizer=sgd_foreach", "recipe=none"),
        ("tensor_parallel=megatron", "mesh.tensor=2", "sharding=ddp"),
        ("pipeline_parallel=one_f_one_b", "mesh.pipeline=2", "sharding=ddp"),
    ],
    ids="ddp zero1 fsdp tensor pipeline".split(),
)
def test_two_ranks_go_on_as_four_under_every_sharding(
    tmp_path: Path, writer: tuple[str, ...]
) -> None:
    optimizer = next((part for part in writer if part.startswith("optimizer")), ADAMW)
    own = [part for part in writer if part.startswith(("averaging", "optimizer"))]
    more = own if optimizer in own else [*own, optimizer]
    readers = [
        asked(4, EXACT, *more, "sharding=ddp"),
        asked(4, EXACT, *more, "sharding=zero1"),
        asked(4, EXACT, *more, "sharding=fsdp"),
        asked(4, EXACT, *more, "sharding=zero2"),
        asked(4, EXACT, *more, "sharding=hsdp"),
        asked(4, EXACT, *more, "sharding=fsdp", "tensor_parallel=megatron", "mesh.tensor=2"),
        asked(4, EXACT, *more, "sharding=zero1", "mesh.tensor=2", "sequence_parallel=megatron_sp"),
        asked(4, EXACT, *more, "pipeline_parallel=one_f_one_b", "mesh.pipeline=2", "sharding=ddp"),
    ]  # fmt: skip
    given = writer if optimizer in writer else (*writer, optimizer)
    check(tmp_path, [asked(2, EXACT, *given)], [(0, reader) for reader in readers], 1e-8)


@pytest.mark.full
def test_four_ranks_go_on_as_two_and_half_precision_keeps_its_masters(tmp_path: Path) -> None:
    half = ("precision=O2", "precision.half_dtype=bfloat16", ADAMW)
    writers = [asked(4, *half, "sharding=zero1"), asked(4, *half, "sharding=fsdp")]
    readers = [
        (0, asked(2, *half, "sharding=ddp")),
        (0, asked(2, *half, "sharding=fsdp")),
        (1, asked(2, *half, "sharding=zero1")),
    ]
    check(tmp_path, writers, readers, 3e-2)


def test_boxes_are_the_numbers_in_their_order() -> None:
    for shape in ((), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)):
        numbers = torch.arange(torch.Size(shape).numel())
        whole = numbers.view(shape)
        for low in range(len(numbers) + 1):
            for high in range(low, len(numbers) + 1):
                cut = [
                    whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                    for offsets, sizes in boxes(shape, low, high)
                ]
                joined = torch.cat([numbers[:0], *(box.flatten() for box in cut)])
                assert torch.equal(joined, numbers[low:high])
                assert all(box.numel() for box in cut)
                assert len(cut) <= max(1, 2 * len(shape) - 1)


def saved(folder: Path, *overrides: str, step: int = 5) -> Path:
    return checkpoint.save(trainer_of(alone(*TRAIN, *overrides)), Position(step, 1.0), folder)


TRAIN = ("task=train", "task.epochs=2")


def reasons(given: Path, *overrides: str) -> str:
    return " ".join(entry(*ALONE, *TRAIN, f"task.resume_from='{given}'", *overrides).reasons)


ALONE = (
    "model.depth=2", "model.width=32", "model.num_heads=4", "model.mlp_width=64",
    "resources.ranks_per_node=1", "sharding=none", "batch.images_per_step=8",
)  # fmt: skip


def test_what_cannot_be_gone_on_from_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert reasons(tmp_path) == reasons(folder) == ""
    assert reasons(tmp_path, "precision=bf16", "optimizer=adamw_fused") == ""
    assert f"{tmp_path}/elsewhere" in reasons(tmp_path / "elsewhere")
    require(reasons(tmp_path, "model.depth=1"), "`model.depth=2` `model.depth=1`")
    assert "`data=digits`" in reasons(tmp_path, "data=synthetic")
    other = reasons(tmp_path, "batch.images_per_step=16")
    require(other, "`images_per_step=8` `images_per_step=16`")
    assert "`optimizer.kind=AdamW`" in reasons(tmp_path, "optimizer=sgd_foreach")
    measured = entry(*ALONE, f"task.resume_from='{tmp_path}'").reasons
    assert "`task=measure`" in " ".join(measured)
    document = json.loads((folder / INFO_FILE).read_text())
    (folder / INFO_FILE).write_text(json.dumps({**document, "course": [1]}))
    assert "`course`" in reasons(tmp_path)
    assert "is damaged: its trained.json" in other_course(alone(*TRAIN), folder)
    (folder / INFO_FILE).write_text(json.dumps(document))
    next(folder.glob("*.distcp")).unlink()
    assert "is damaged (" in reasons(tmp_path)


def test_of_a_damaged_checkpoint_of_another_cell_the_one_before_is_used(tmp_path: Path) -> None:
    saved(tmp_path, step=5)
    newest = saved(tmp_path, step=7)
    next(newest.glob("*.distcp")).unlink()
    assert reasons(newest) == ""
    trainer = trainer_of(alone(*TRAIN, "seed=0"))
    manager = CheckpointManager(
        tmp_path / "own", (), StopConsensus(Event(), trainer.world.device), resume_from=str(newest)
    )
    assert manager.resume(trainer).step == 5
    assert "step-000000007` is damaged: " in manager.resumed


def test_a_training_that_was_to_go_on_never_begins_anew_unseen(tmp_path: Path) -> None:
    saved(tmp_path, "model.depth=1")
    trainer = trainer_of(alone(*TRAIN))
    manager = CheckpointManager(
        tmp_path / "own",
        (),
        StopConsensus(Event(), trainer.world.device),
        resume_from=str(tmp_path),
    )
    with pytest.raises(VitsweepError, match=r"`model.depth=1`"):
        manager.resume(trainer)


def test_going_on_is_a_cell_of_its_own_and_other_cells_keep_their_id(tmp_path: Path) -> None:
    plain = alone(*TRAIN)
    assert alone(*TRAIN, f"task.resume_from='{tmp_path}'").cell_id != plain.cell_id
    assert alone(*TRAIN, "task.resume_from=null").cell_id == plain.cell_id
