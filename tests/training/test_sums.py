"""The loss of a step is a sum over all replicas and micro-batches, divided by what all of them count."""

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import vitsweep
from tests.cells import TINY, entry
from tests.data.cells_and_worlds import world as alone
from tests.extras import NEEDS_APPLY
from tests.ranks import on_ranks, placed
from tests.test_mappings import MASKED, OWN_LOSS
from tests.user_data import masked_batch
from tests.user_modules import mean_of_shown
from vitsweep.model.build import build_model, first_model
from vitsweep.objectives.base import OpenObjective
from vitsweep.parallelize import parallelize
from vitsweep.proof.prove import proof_of
from vitsweep.proof.twin import IN_PARTS, parts_of, twin_of
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import MEAN_OVER_PARTS, with_equal_parts
from vitsweep.training.shards import plain_weights
from vitsweep.world import World

EXACT = ("precision=fp32", "precision.dtype=float64", "resources.threads_per_rank=1")
RATE = 0.5
SGD = ("optimizer=sgd_loop", f"optimizer.learning_rate={RATE}", "optimizer.momentum=0",
       "optimizer.weight_decay=0", "optimizer.clip_norm=null")  # fmt: skip
REPLICAS = {
    "accumulation": ("sharding=ddp",),
    "ddp": ("sharding=ddp",),
    "fsdp": ("sharding=fsdp",),
    "zero1": ("sharding=zero1",),
    "zero2": ("sharding=zero2",),
}
SHARING = {
    "gpipe": ("pipeline_parallel=gpipe", "mesh.pipeline=2"),
    "one_f_one_b": ("pipeline_parallel=one_f_one_b", "mesh.pipeline=2", "sharding=fsdp"),
    "ulysses": ("sequence_parallel=ulysses", "mesh.ulysses=2"),
    "ring": ("sequence_parallel=ring", "mesh.ring=2", "sharding=fsdp"),
    "megatron": ("tensor_parallel=megatron", "mesh.tensor=2"),
}
SUMS = (
    "objective=module",
    "objective.target=tests.user_modules.sum_of_shown",
    "objective.count=tests.user_modules.number_of_shown",
)


def of_labels(ranks: int, parts: int, words: tuple[str, ...]) -> CellSpec:
    """A cell of vitsweep's ViT, for `apply`."""
    return made(TINY, ranks, parts, words)


def of_sums(ranks: int, parts: int, words: tuple[str, ...]) -> CellSpec:
    """A cell with an `objective.target` that is a sum, and its count."""
    return made((*MASKED, *SUMS, "batch.images_per_step=48"), ranks, parts, words)


def made(model: tuple[str, ...], ranks: int, parts: int, words: tuple[str, ...]) -> CellSpec:
    size = (f"resources.ranks_per_node={ranks}", f"batch.accumulation_steps={parts}")
    found = entry(*model, "batch.images_per_step=48", *EXACT, *SGD, *size, *words)
    assert not found.reasons, found.reasons
    return found.spec


def labelled_batch(cell: CellSpec, images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images and labels, of which each replica ignores another share, and the first one all but one."""
    generator = torch.Generator().manual_seed(seed)
    side = cell.batch.resolution_px
    pictures = torch.randn(images, *cell.model.input_shape(side), generator=generator)
    labels = torch.randint(cell.model.num_classes, (images,), generator=generator)
    shown = torch.rand(images, generator=generator) < torch.linspace(0.1, 0.9, images)
    labels[~shown] = -100
    labels[0] = 1
    return pictures, labels


def after_one_step(plain: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Weights of a plain loop over the whole batch."""
    loss.backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= RATE * parameter.grad
    return plain.state_dict()


def apart(world: World, case: tuple[CellSpec, int]) -> float:
    """Return how far weights and loss are from the plain loop's after a step, over how far that moved."""
    cell, seed = case
    world, replicas = placed(world, cell), cell.mesh.data_parallel_size
    torch.manual_seed(0)
    plain = build_model(cell).double()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    if cell.loss_count:
        batch = masked_batch(48, 8, seed)
        order = batch["mask"].sum((1, 2)).argsort()  # replicas and parts that count differently
        doubled = {n: (t.double() if t.is_floating_point() else t)[order] for n, t in batch.items()}
        loss = mean_of_shown(plain(doubled["image"], doubled["mask"]), doubled)
        cuts = {n: t.chunk(replicas)[world.data_parallel_rank] for n, t in doubled.items()}
        parts = cell.batch.accumulation_steps
        micro: list[Any] = [{n: t.chunk(parts)[p] for n, t in cuts.items()} for p in range(parts)]
        torch.manual_seed(0)
        trainer = parallelize(build_model(cell), cell, world)
        found = trainer.step(iter(micro))
        weights = plain_weights(trainer)
    else:
        # replicas and micro-batches of different lengths
        images = replicas * 16 if with_equal_parts(cell) else replicas * 13 + replicas // 2
        batch = labelled_batch(cell, images, seed)
        loss = F.cross_entropy(plain(batch[0].double()), batch[1])
        own = tuple(t.tensor_split(replicas)[world.data_parallel_rank] for t in batch)
        torch.manual_seed(0)
        with vitsweep.apply(cell, build_model(cell)) as applied:
            found = applied.step(own)
            weights = applied.weights()
    mean = found.clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
    wanted = after_one_step(plain, loss)
    moved = max(float((wanted[n] - w).abs().max()) for n, w in before.items())
    differs = max(float((weights[n] - w).abs().max()) for n, w in wanted.items())
    return max(differs, abs(float(mean) / world.size - float(loss.detach()))) / moved


def all_apart(world: World, cases: list[tuple[CellSpec, int]]) -> list[float]:
    return [apart(world, case) for case in cases]


def assert_equal(ranks: int, cases: list[tuple[CellSpec, int]], folder: Path) -> None:
    for found in on_ranks(ranks, all_apart, cases[0][0], cases, folder=folder):
        assert max(found) < 1e-10, found


@NEEDS_APPLY
def test_ignored_labels_and_own_counts_train_as_the_whole_batch(tmp_path: Path) -> None:
    cells = [
        of_labels(2, 3, REPLICAS["ddp"]),
        of_labels(2, 2, REPLICAS["fsdp"]),
        of_sums(2, 3, REPLICAS["zero1"]),
        of_sums(2, 1, REPLICAS["zero2"]),
        of_labels(2, 1, SHARING["ring"]),
        of_labels(2, 1, SHARING["gpipe"]),
    ]
    assert_equal(2, [(cell, 0) for cell in cells], tmp_path)


def drawn(ranks: int, count: int) -> list[tuple[CellSpec, int]]:
    rng, found = random.Random(ranks), []
    for seed in range(count):
        # every kind of technique in turn
        sums = seed % 3 == 0
        named = REPLICAS if sums or ranks == 1 else REPLICAS | SHARING
        name = list(named)[seed // (3 if sums else 2) % len(named)]
        parts = rng.choice((2, 3, 4) if name == "accumulation" else (1, 2, 3))
        words = ("sharding=none",) if ranks == 1 else named[name]
        if "pipeline_parallel" in words[0]:
            parts = 1
        found.append(((of_sums if sums else of_labels)(ranks, parts, words), seed))
    return found


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "count"), [(1, 6), (2, 30), (4, 24)])
def test_sixty_drawn_cells_do(ranks: int, count: int, tmp_path: Path) -> None:
    assert_equal(ranks, drawn(ranks, count), tmp_path)


def test_a_mean_of_means_is_found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    world = alone()
    cell = of_sums(1, 2, ("sharding=none",))
    assert apart(world, (cell, 0)) < 1e-10
    monkeypatch.setattr(OpenObjective, "divisors", by_own_counts)
    assert apart(world, (cell, 0)) > 1e-3


def by_own_counts(self: OpenObjective, micro_batches: list[Any], *_: Any) -> list[Tensor]:
    counted = map(self.count, micro_batches)
    return [torch.as_tensor(count).double() * len(micro_batches) for count in counted]


def test_where_parts_are_equal_by_construction_nothing_is_counted() -> None:
    loss = "objective.target=tests.user_modules.class_and_size"
    one = ("sharding=none", "resources.ranks_per_node=1")
    own = entry(*MASKED, "objective=module", loss, *one).spec
    for cell in (of_labels(1, 2, ("sharding=none",)), own):
        assert parallelize(first_model(cell), cell, alone()).objective.reduction == "mean"


# What the proof says of a loss whose parts count differently.


def proof(world: World, *words: str) -> str:
    cell = made((*MASKED,), world.size, 1, ("sharding=ddp", *words))
    return proof_of(cell, placed(world, cell))


def proofs(world: World) -> dict[str, str]:
    """Return by case what the proof says, or how it ends."""
    four, found = "batch.accumulation_steps=2", {}
    own, losses = "objective=module", "objective.target=tests.user_modules"
    for name, words in {
        "sums": (*SUMS, four),
        "mean of shown pixels": (own, f"{losses}.mean_of_shown", four),
        "mean of images": (own, f"{losses}.class_and_size", four),
        "outputs of company": ("model.target=tests.user_modules.MaskedWithCompany", *SUMS, four),
        "a buffer": ("model.target=tests.user_modules.MaskedThatCounts", *SUMS, four),
        "a mean beside a count": (*SUMS, "objective.target=tests.user_modules.mean_of_shown"),
    }.items():
        found[name] = said(world, *words)
    for name, planted in {
        "divided by the number of parts": lambda self, parts, *_: [len(parts)] * len(parts),
        "divided by their own counts": by_own_counts,
    }.items():
        OpenObjective.divisors, kept = planted, OpenObjective.divisors  # type: ignore[assignment, method-assign]
        found[name] = said(world, *SUMS, four)
        OpenObjective.divisors = kept  # type: ignore[method-assign]
    return found


def test_a_mean_of_valid_entries_is_named_whatever_one_batch_shows() -> None:
    """Parts count alike in the first batch, or there is one part alone."""
    cell = twin_of(made(MASKED, 2, 1, (*OWN_LOSS, "sharding=ddp")))
    for loss in ("mean_of_shown", "mean_where_shown", "mean_of_labelled", "class_and_size"):
        for batch, ranks, parts in product(("masked_batch", "even_at_first"), (1, 2), (1, 2, 4)):
            twin = replace(
                cell,
                model=replace(cell.model, twin_batch=f"tests.user_data.{batch}"),
                objective=replace(cell.objective, target=f"tests.user_modules.{loss}"),
                mesh=replace(cell.mesh, replicate=ranks),
                batch=replace(cell.batch, images_per_step=4 * parts, accumulation_steps=parts),
            )
            told = MEAN_OVER_PARTS in parts_of(twin, alone()).told
            assert told == (loss != "class_and_size"), (loss, batch, ranks, parts)


def said(world: World, *words: str) -> str:
    try:
        return proof(world, *words)
    except vitsweep.VitsweepError as error:
        return str(error)


def test_the_proof_compares_with_the_whole_batch_and_names_a_mean_over_parts(
    tmp_path: Path,
) -> None:
    cell = of_sums(2, 1, ("sharding=ddp",))
    for found in on_ranks(2, proofs, cell, folder=tmp_path):
        for name in ("sums", "mean of images"):
            assert found[name].startswith("twin "), found[name]
            assert MEAN_OVER_PARTS not in found[name]
            assert IN_PARTS not in found[name]
        assert found["mean of shown pixels"].endswith(MEAN_OVER_PARTS)
        for name in ("outputs of company", "a buffer"):
            assert found[name].startswith("twin "), found[name]
            assert found[name].endswith(IN_PARTS)
        assert "`losses.sum()`" in found["a mean beside a count"]
        for name in ("divided by the number of parts", "divided by their own counts"):
            assert "twin's loss" in found[name], found[name]
