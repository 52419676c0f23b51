"""Training for `task.epochs` to an accuracy: learning rate, resumable loop, evaluation."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from vitsweep.collectives.primitives import broadcast_together, gathered
from vitsweep.data.batches import ReplicaSampler
from vitsweep.model.module_look import as_it_was, is_writable
from vitsweep.objectives.base import Batch, Step, as_entries, as_given, at_least_float32
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
from vitsweep.spec.from_yaml import imported_function
from vitsweep.spec.generators import named_seed, set_generators
from vitsweep.training.checkpoint import Position
from vitsweep.training.checkpoint_manager import CheckpointManager, Decision, WeightKeeper
from vitsweep.training.regularize import augmented
from vitsweep.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training to an accuracy gave.

    Attributes:
        metrics: columns of the record.
        reasons: why some of them are empty, `<column>_reason`.
        curve: the evaluations, oldest first.
        samples: further raw values for the record.
        flags: of validity.
    """

    metrics: dict[str, float | None]
    reasons: dict[str, str]
    curve: list[dict[str, float]]
    samples: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)


def train_epochs(
    trainer: Trainer,
    batches: Batches,
    checkpoints: CheckpointManager | None = None,
    keeper: WeightKeeper | None = None,
) -> Training:
    """Train for `task.epochs`, and evaluate on the held-out images every so many of them.

    A training whose loss became inf or NaN ends at the next evaluation; `trainer.non_finite` says so.

    Args:
        trainer: with newly initialised weights.
        batches: training and test batches.
        checkpoints: with it, training resumes from a checkpoint of an earlier attempt, writes
            checkpoints while it runs, and can be interrupted between two steps.
        keeper: with it, the last weights are kept in files.

    Raises:
        TrainingInterrupted: a stop was requested; a checkpoint of all steps so far is on disk.
    """
    cell = trainer.cell
    per_epoch = batches.num_train // cell.images_per_step
    total = cell.task.epochs * per_epoch
    done = checkpoints.resume(trainer) if checkpoints else Position()
    trainer.steps_taken, trainer.total_steps = done.step, total
    begin = time.perf_counter() - done.seconds

    def at(step: int) -> Position:
        return replace(done, step=step, seconds=time.perf_counter() - begin)

    def save_if_agreed(step: int) -> None:
        nonlocal begin
        if not checkpoints:
            return
        decision = checkpoints.decide(at_once=step == total)
        if decision == Decision.stop:
            checkpoints.save_and_stop(trainer, at(step))
        if decision == Decision.save and step < total:
            _wait_for_device(trainer)
            position = at(step)
            checkpoints.save(trainer, position)
            begin = time.perf_counter() - position.seconds  # writing does not count

    step = done.step
    while step < total:
        epoch, first = divmod(step, per_epoch)
        stream = batches.train(epoch, first * cell.batch.accumulation_steps)
        if cell.recipe.augments:
            stream = augmented(stream, cell, trainer.world, step)
        for _ in range(first, per_epoch):
            save_if_agreed(step)
            set_learning_rate(trainer.optimizer, cell, step, total)
            trainer.step(stream)
            step += 1
        if _is_evaluated(cell, epoch + 1):
            _wait_for_device(trainer)
            seconds = time.perf_counter() - begin
            point = evaluate(trainer, batches, epoch + 1, seconds)
            begin = time.perf_counter() - seconds  # evaluations do not count
            done = replace(done, curve=(*done.curve, point))
            if bool(trainer.non_finite):
                break
    save_if_agreed(step)
    if dist.is_initialized():
        dist.barrier()
    seconds = time.perf_counter() - begin
    training = summarized(cell, list(done.curve), seconds)
    training.flags.update(trainer.objective.flags(training.curve[-1]))
    if trainer.average is not None and not trainer.objective.momentum:
        raw = evaluate(trainer, batches, cell.task.epochs, seconds, averaged=False)
        main = next(iter(cell.objective.scores))
        training.metrics[f"{main}_raw"] = raw[main]
    if cell.task.held_out:
        training.samples["held_out"], reason = held_out(trainer, batches, cell.task.held_out)
        training.reasons.update({"held_out_reason": reason} if reason else {})
    if keeper and not bool(trainer.non_finite):
        keeper.finish(trainer, training.curve[-1])
    return training


def summarized(cell: CellSpec, curve: list[dict[str, float]], seconds: float) -> Training:
    """Return the columns of a training from its curve.

    Args:
        cell: its `task.target_accuracy` is what `seconds_to_target` is the time to.
        curve: evaluations, oldest first; the last one is of the trained model.
        seconds: training time.
    """
    last: dict[str, float | None] = dict(curve[-1]) if curve else {}
    metrics: dict[str, float | None] = {
        **{name: last.get(name) for name in cell.objective.scores},
        "train_seconds": seconds,
        "seconds_to_target": None,
        "epochs_to_target": None,
    }
    target = cell.task.target_accuracy
    if target is None:
        return Training(metrics=metrics, reasons={}, curve=curve)
    reached = next((point for point in curve if point["accuracy_top1"] >= target), None)
    if reached:
        metrics |= {"seconds_to_target": reached["seconds"], "epochs_to_target": reached["epoch"]}
        return Training(metrics=metrics, reasons={}, curve=curve)
    best = max((point["accuracy_top1"] for point in curve), default=0.0)
    trained = last.get("epoch") or 0  # fewer than `task.epochs` where it diverged
    epochs = f"{trained:g} epoch{'' if trained == 1 else 's'}"
    reason = f"`task.target_accuracy={target:g}` was not reached: {best:.4f} at most in {epochs}"
    return Training(metrics=metrics, reasons={"seconds_to_target_reason": reason}, curve=curve)


def _is_evaluated(cell: CellSpec, epochs: int) -> bool:
    every = cell.task.evaluate_every_epochs
    return epochs == cell.task.epochs or bool(every and epochs % every == 0)


def _wait_for_device(trainer: Trainer) -> None:
    if trainer.world.device.type == "cuda":
        torch.cuda.synchronize()


def learning_rate(cell: CellSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of one step: linear warm-up, then half a cosine to zero.

    `recipe.learning_rate_schedule` takes its place with that of a library, in which the rate changes from
    epoch to epoch and the cosine begins with the training, not at the end of the warm-up.

    - `timm`: `CosineLRScheduler` (timm/scheduler/cosine_lr.py, `_get_lr`) with the defaults of DeiT
      (facebookresearch/deit, main.py): `--warmup-lr` 1e-6, `--min-lr` 1e-5.
    - `pycls`: `get_epoch_lr` (facebookresearch/pycls, pycls/core/optimizer.py) with its WARMUP_FACTOR 0.1
      and the MIN_LR 0.005 of configs/fsdp/example.yaml, both of which are shares of the peak.

    Args:
        cell: its `optimizer.learning_rate` is the peak; `task.warmup_epochs` is the warm-up.
        step: optimizer step, from 0.
        total_steps: optimizer steps of the whole training.
    """
    warm_up, peak = cell.task.warmup_epochs, cell.optimizer.learning_rate
    if schedule := cell.recipe.learning_rate_schedule:
        epoch = step * cell.task.epochs // total_steps
        return _SCHEDULES[schedule](epoch, cell.task.epochs, warm_up, peak)
    warm = warm_up / max(cell.task.epochs, 1) * total_steps
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1.0, total_steps - warm)
    return peak * _half_cosine(progress)


def _timm_rate(epoch: int, epochs: int, warm_up: float, peak: float) -> float:
    first, last = 1e-6, 1e-5
    if epoch < warm_up:
        return first + epoch * (peak - first) / warm_up
    return last + (peak - last) * _half_cosine(epoch / epochs)


def _pycls_rate(epoch: int, epochs: int, warm_up: float, peak: float) -> float:
    factor, last = 0.1, 0.005
    rate = peak * (last + (1 - last) * _half_cosine(epoch / epochs))
    if epoch < warm_up:
        rate *= factor + (1 - factor) * epoch / warm_up
    return rate


_SCHEDULES = {"timm": _timm_rate, "pycls": _pycls_rate}


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, cell: CellSpec, step: int, total_steps: int) -> None:
    """Set the learning rate of every parameter group for one step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(cell, step, total_steps)


def evaluate(
    trainer: Trainer, batches: Batches, epoch: float, seconds: float, *, averaged: bool = True
) -> dict[str, float]:
    """Return a point of the training curve: each held-out image counts once over all ranks.

    Every replica has the same number of test batches, since a forward pass of a sharded model gathers
    parameters from all ranks. Afterwards `trainer.non_finite` is the same on all ranks.

    Args:
        trainer: its model is evaluated.
        batches: of the held-out images.
        epoch: epochs trained.
        seconds: training time of all attempts until then, without evaluations.
        averaged: with the averaged weights, where there are any.

    Returns:
        `epoch`, `seconds` and the `scores` of the objective.
    """
    with _evaluating(trainer), trainer.averaged_weights() if averaged else nullcontext():
        found = trainer.objective.evaluate(
            trainer.predict, _held_out_batches(trainer, batches), trainer.world.device
        )
    non_finite = trainer.non_finite.double()
    if dist.is_initialized():
        dist.all_reduce(non_finite)
    trainer.non_finite |= non_finite > 0
    return {"epoch": epoch, "seconds": seconds} | found


def _held_out_batches(trainer: Trainer, batches: Batches) -> Iterator[tuple[Batch, Step]]:
    """Yield this replica's held-out batches with their places in the test order."""
    step, num_images = trainer.at(), batches.num_test
    places = ReplicaSampler.of(trainer.cell, trainer.world).test(num_images)
    for batch, rows in zip(batches.test(), places, strict=True):
        at = replace(step, first=int(rows[0]), num_images=num_images, of_held_out=True)
        yield as_entries(batch), at


@contextmanager
def _evaluating(trainer: Trainer) -> Iterator[None]:
    """Context in which the model evaluates; the training goes on as if there had been none."""
    draws = trainer.draws
    with as_it_was(trainer.model):
        set_generators(named_seed(draws.seed, f"evaluation {draws.replica}"), trainer.world.device)
        if trainer.cell.model.norms_over_batch and trainer.world.data_parallel_size > 1:
            # every replica gets the running statistics of the first, which are those that are kept:
            # DDP does so in each forward pass (`broadcast_buffers`), FSDP never
            buffers = [b for b in trainer.model.buffers() if b.is_floating_point()]
            if statistics := [b for b in buffers if is_writable(b)]:
                group = trainer.world.gradient_group() or dist.group.WORLD
                assert group is not None
                broadcast_together(statistics, group)
        trainer.model.eval()
        yield


def held_out(trainer: Trainer, batches: Batches, path: str) -> tuple[dict[str, list[Any]], str]:
    """Return what a function of the user's keeps of every held-out image, and why it keeps nothing.

    Args:
        trainer: its model, with averaged weights where there are any.
        batches: of the held-out images.
        path: `task.held_out`.

    Returns:
        Name -> values, one per image, in no set order; the same on every rank.
    """
    kept: dict[str, list[Any]] = {}
    fault = ""
    with _evaluating(trainer), trainer.averaged_weights():
        for batch, at in _held_out_batches(trainer, batches):
            prepared = trainer.objective.prepare(batch, at)
            outputs = tree_map_only(torch.Tensor, at_least_float32, trainer.predict(prepared))
            if fault:  # the forward pass was for the other ranks
                continue
            try:
                for name, values in imported_function(path)(outputs, as_given(batch)).items():
                    kept.setdefault(name, []).extend(values.tolist())
            except Exception as error:  # the function is the user's
                fault = f"{path} raised {type(error).__name__}: {error}"
    ranks = gathered({"replica": trainer.world.data_parallel_rank, "kept": kept, "fault": fault})
    if fault := next((rank["fault"] for rank in ranks if rank["fault"]), ""):
        return {}, fault
    replicas = {rank["replica"]: rank["kept"] for rank in ranks}.values()
    return {name: [v for one in replicas for v in one[name]] for name in kept}, ""
