"""One optimizer step, however it is cut up: accumulation, clipping, scheduled rates, evaluation."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cells import cell
from tests.equivalence import whole_weights
from tests.ranks import on_ranks, placed
from tests.training.alone import alone, batch, trainer_of
from vitsweep.model.block import blocks_of
from vitsweep.model.build import build_model, first_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.epochs import evaluate, train_epochs
from vitsweep.training.shards import plain_weights
from vitsweep.training.timed_steps import endless
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

EXACT = ("precision.dtype=float64", "optimizer=sgd_loop", "optimizer.weight_decay=0")
RATE = "optimizer.learning_rate=1.0"
SHARDINGS = ("ddp", "zero1", "zero2", "fsdp")


def asked(ranks: int, *overrides: str) -> CellSpec:
    place = [f"resources.ranks_per_node={ranks}", "resources.threads_per_rank=1"]
    return cell(*EXACT, *place, *overrides)


def built(spec: CellSpec, world: World) -> Trainer:
    torch.manual_seed(spec.seed)
    return parallelize(build_model(spec), spec, world)


def trained(world: World, cells: list[CellSpec], steps: int) -> list[dict[str, Tensor]]:
    return [_trained(placed(world, spec), spec, steps) for spec in cells]


def _trained(world: World, spec: CellSpec, steps: int) -> dict[str, Tensor]:
    trainer = built(spec, world)
    for step in range(steps):
        trainer.step(iter(my_share(spec, global_batch(spec, step, world), world)))
    return whole_weights(trainer.model.named_parameters())


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name, **tolerance)


def test_accumulated_micro_batches_make_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    cuts = (1, 2, 4)
    cells = [
        asked(2, f"sharding={sharding}", f"batch.accumulation_steps={cut}")
        for sharding in SHARDINGS
        for cut in cuts
    ]
    ends = on_ranks(2, trained, cells[0], cells, 2, folder=tmp_path)[0]
    for group in range(0, len(ends), len(cuts)):
        for end in ends[group + 1 : group + len(cuts)]:
            assert_equal(end, ends[0], rtol=1e-10, atol=1e-12)


def test_each_micro_batch_is_taken_once_and_the_loss_is_their_mean() -> None:
    trainer = trainer_of(alone("precision.dtype=float64", "batch.accumulation_steps=4"))
    parts = [batch(step, images=2) for step in range(5)]
    with torch.no_grad():
        wanted = [F.cross_entropy(trainer.model(x.double()), y) for x, y in parts[:4]]
    stream = iter(parts)
    loss = trainer.step(stream)
    assert float(loss) == pytest.approx(float(torch.stack(wanted).mean()), rel=1e-12)
    assert len(list(stream)) == 1


def test_clipping_is_torchs_on_the_reference_model_under_each_sharding(tmp_path: Path) -> None:
    """With a rate of 1 a step of SGD moves the weights by the clipped gradient."""
    limit = 0.1
    clipped = [asked(2, f"sharding={s}", RATE, f"optimizer.clip_norm={limit}") for s in SHARDINGS]
    ends = on_ranks(2, trained, clipped[0], clipped, 1, folder=tmp_path)[0]
    torch.manual_seed(clipped[0].seed)
    plain = build_model(clipped[0]).double()
    begin = whole_weights(plain.named_parameters())
    images, labels = global_batch(clipped[0], 0, trainer_of(alone()).world).values()
    F.cross_entropy(plain(images.double()), labels).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
    assert float(norm) > 2 * limit, "there is something to clip"
    wanted = whole_weights((name, p.grad) for name, p in plain.named_parameters())
    for end in ends:
        moved = {name: begin[name] - value for name, value in end.items()}
        assert_equal(moved, wanted, rtol=1e-9, atol=1e-12)


def test_a_large_limit_clips_nothing(tmp_path: Path) -> None:
    cells = [asked(2, RATE, f"optimizer.clip_norm={limit}") for limit in ("null", "1e6")]
    free, loose = on_ranks(2, trained, cells[0], cells, 1, folder=tmp_path)[0]
    assert_equal(loose, free, rtol=1e-12, atol=1e-14)


def test_losses_that_are_not_finite_are_noticed_without_reading_them() -> None:
    trainer = trainer_of(alone())
    trainer.step(iter([batch()]))
    assert not trainer.non_finite
    images, labels = batch(1)
    trainer.step(iter([(images * float("nan"), labels)]))
    trainer.step(iter([batch(2)]))
    assert trainer.non_finite


def scheduled(world: World, cells: list[CellSpec]) -> list[dict[str, Tensor]]:
    return [_scheduled(placed(world, spec), spec) for spec in cells]


def _scheduled(world: World, spec: CellSpec) -> dict[str, Tensor]:
    trainer = built(spec, world)
    train_epochs(trainer, spec.data.open(spec, world))
    return whole_weights(trainer.model.named_parameters())


@pytest.mark.slow
def test_the_scheduled_rate_reaches_the_optimizer_under_each_sharding(tmp_path: Path) -> None:
    given = ("task=train", "task.epochs=2", "task.warmup_epochs=1", "batch.images_per_step=256")
    optimizers = ("sgd_loop", "sgd_contiguous")
    kinds = [f"sharding={s}" for s in SHARDINGS] + [f"optimizer={o}" for o in optimizers]
    cells = [asked(2, *given, kind) for kind in kinds]
    ends = on_ranks(2, scheduled, cells[0], cells, folder=tmp_path)[0]
    for end in ends[1:]:
        assert_equal(end, ends[0], rtol=1e-9, atol=1e-11)


Evaluated = dict[str, Any]


def evaluated(world: World, specs: list[CellSpec]) -> list[Evaluated]:
    return [_evaluated(placed(world, spec), spec) for spec in specs]


def _evaluated(world: World, spec: CellSpec) -> Evaluated:
    """Accuracy, what was right image by image, and whether the model trains again afterwards."""
    trainer, batches = built(spec, world), spec.data.open(spec, world)
    stream = endless(batches)
    for _ in range(3):
        trainer.step(stream)
    honest, seen = trainer.predict, []

    def predict(batch: Any) -> Tensor:
        assert not trainer.model.training
        images, outputs = batch["image"], honest(batch)
        seen.extend(
            zip([x.numpy().tobytes() for x in images], outputs.argmax(-1).tolist(), strict=True)
        )
        return outputs

    trainer.predict = predict  # type: ignore[method-assign]
    found = evaluate(trainer, batches, 1, 0.0)
    accuracy, top5 = found["accuracy_top1"], found["accuracy_top5"]
    return {"accuracy": accuracy, "top5": top5, "seen": seen, "training": trainer.model.training}


HELD_OUT = 599


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[list[Evaluated]]]:
    """Evaluations of each sharding on some ranks, rank by rank."""

    def of(ranks: int, *shardings: str) -> list[list[Evaluated]]:
        cells = [asked(ranks, f"sharding={s}", "batch.images_per_step=64") for s in shardings]
        folder = tmp_path_factory.mktemp("evaluated")
        return on_ranks(ranks, evaluated, cells[0], cells, folder=folder)

    return of


@pytest.mark.slow
def test_each_held_out_image_counts_once_on_any_number_of_ranks(
    evaluations: Callable[..., list[list[Evaluated]]],
) -> None:
    [[alone_]] = evaluations(1, "none")
    assert len(alone_["seen"]) == HELD_OUT
    assert 0.05 < alone_["accuracy"] < 0.95
    for ranks, shardings in ((2, ("ddp", "zero1", "fsdp")), (4, ("ddp", "fsdp", "hsdp"))):
        by_rank = evaluations(ranks, *shardings)
        for index in range(len(shardings)):
            of_ranks = [rank[index] for rank in by_rank]
            seen = [pair for rank in of_ranks for pair in rank["seen"]]
            assert len(seen) == HELD_OUT
            assert sorted(seen) == sorted(alone_["seen"])
            assert {rank["accuracy"] for rank in of_ranks} == {alone_["accuracy"]}
            assert {rank["top5"] for rank in of_ranks} == {alone_["top5"]}
            assert all(rank["training"] for rank in of_ranks)


BROKEN_OFF = (
    ("sharding=ddp", "sharding.bucket_mib=0.001"),
    ("sharding=ddp", "optimizer=adamw_contiguous"),
    ("sharding=zero1", "sharding.bucket_mib=0.001"),
    ("sharding=fsdp",),
)


def _after_a_backward_pass_that_was_broken_off(world, cells):
    faults = []
    for own in cells:
        here, weights = placed(world, own), []
        for breaks in (False, True):
            trainer = parallelize(first_model(own), own, here)
            left = [own.batch.accumulation_steps] * breaks
            handle = blocks_of(trainer.model)[0].register_forward_hook(partial(_stop, left))
            shares = [my_share(own, global_batch(own, step, here), here) for step in range(3)]
            if breaks:
                with pytest.raises(InterruptedError):
                    trainer.step(iter(shares[2]))
            handle.remove()
            losses = [float(trainer.step(iter(share))) for share in shares]
            weights.append((losses, plain_weights(trainer)))
        (losses, whole), (others, found) = weights
        faults += [own.sharding.name] * (losses != others)
        faults += [n for n, w in whole.items() if not torch.equal(w, found[n])]
    return faults


def _stop(left, module, inputs, output):
    """Break off the backward pass of the last micro-batch, when later blocks have gradients."""
    if left:
        left[0] -= 1
        if not left[0]:
            output.register_hook(_interrupted)


def _interrupted(gradient):
    raise InterruptedError


def test_steps_after_one_that_was_broken_off_are_those_without_it(tmp_path):
    cells = [cell(*chosen, "batch.accumulation_steps=2") for chosen in BROKEN_OFF]
    for found in on_ranks(
        2, _after_a_backward_pass_that_was_broken_off, cells[0], cells, folder=tmp_path
    ):
        assert not found
