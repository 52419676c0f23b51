"""Proof of equality: a tiny twin of a cell, trained with its techniques, must match plain training."""

from dataclasses import replace
from itertools import count

import torch
import torch.distributed as dist

from vitsweep.errors import VitsweepError
from vitsweep.model.build import first_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.measurement import Batch
from vitsweep.techniques.optimizer.sgd import SGD
from vitsweep.training.reference import plain_gradients, plain_losses
from vitsweep.training.shards import Named, whole_tensors
from vitsweep.training.trainer import MicroBatch, Trainer
from vitsweep.world import World, allow_tf32

STEPS = 4
HALVINGS = 20
"""Overflows in a row until a dynamic loss scale is low enough: from 2**16 to below 1."""
LEARNING_RATE = 0.05
MOST_ROUNDING = 0.4
"""Relative distance of a gradient that no rounding excuses: half or twice of it is 0.5 and 1 away."""


class WrongResultError(VitsweepError):
    """A cell trained with its techniques has other losses than plain training."""


def twin_of(cell: CellSpec) -> CellSpec:
    """Return the cell with a nano model and a few images per replica, everything else kept.

    FP8 products need a number of rows divisible by 16: 16 computed images are, whatever the tokens.
    """
    model = cell.model.twin(
        depth=cell.mesh.pipeline * cell.pipeline_parallel.stages_per_rank,
        num_classes=max(16, cell.mesh.data_parallel_size),
    )
    parts = cell.pipeline_parallel.microbatches
    least = max(cell.vit_block.least_images, cell.tokens.least_images)
    images = max(-(-4 // parts), least)  # of one forward pass
    if cell.precision.float8:
        images = next(n for n in count(max(16, least)) if cell.vit_block.kept(n) % 16 == 0)
    batch = Batch(
        name="twin",
        images_per_step=parts * images * cell.batch.accumulation_steps,
        scope="per_replica",
        accumulation_steps=cell.batch.accumulation_steps,
        resolution_px=cell.model.twin_resolution_px or cell.batch.resolution_px,
    )
    return replace(cell, model=model, batch=batch, precision=cell.precision.of_twin())


def prove(cell: CellSpec, world: World) -> float:
    """Train twins of the cell on its own ranks and compare their losses with plain training.

    Both start from the same weights and see the same global batches; the plain model is trained
    here too, alone on the whole batch, in float32 (float64 where the cell is). All techniques but
    the optimizer are proved under SGD, since AdamW hides a wrong scale of the gradients; the
    optimizer's own implementation is then proved against the plain loop of its kind.

    Under SGD the gradients of the first step are compared as well, tensor by tensor: a few losses
    hardly show a gradient of twice the size.

    Returns:
        The largest relative difference of a loss.

    Raises:
        WrongResultError: it exceeds the tolerance of precision and sharding, or a gradient is further from
            the plain one than rounding explains.
    """
    twin = twin_of(cell)
    under_sgd = replace(twin, optimizer=_plain_sgd(cell))
    return max(_difference(proved, world) for proved in dict.fromkeys((under_sgd, twin)))


def _difference(twin: CellSpec, world: World) -> float:
    allow_tf32(False)  # the reference rounds as little as float32 can; `parallelize` sets its own
    reference = _plain_losses(twin, world)
    losses, gradients = _train_twin(twin, world)
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
    tolerance = _tolerance(twin)
    if not difference <= tolerance:  # a NaN is wrong too
        raise WrongResultError(
            f"The nano twin's losses {_short(losses)} differ from plain training's "
            f"{_short(reference)} by {difference:.2g} under `optimizer={twin.optimizer.name}` "
            f"(`precision={twin.precision.name}` allows {tolerance:g}): a technique or this "
            "hardware computes something else."
        )
    if twin.optimizer == _plain_sgd(twin):
        _compare_gradients(twin, gradients, world)
    return difference


def _tolerance(twin: CellSpec) -> float:
    """How far a loss may lie from plain training's."""
    parts = (twin.precision, twin.sharding, twin.optimizer)
    return max(part.relative_tolerance() for part in parts)


def _compare_gradients(twin: CellSpec, gradients: Named, world: World) -> None:
    """Refuse gradients whose relative L2 distance from plain ones is more than rounding explains.

    What rounding does is measured: the plain model's gradients in the cell's precision, beside those
    in float32.
    """
    batch = _global_batch(twin, 0, world)
    allow_tf32(False)
    plain = plain_gradients(twin, batch, world.device, rounded=False)
    allow_tf32(twin.precision.plan().tf32)
    rounded = plain_gradients(twin, batch, world.device, rounded=True)
    rounding = max(_distances(rounded, plain).values())
    floor = min(0.1, 10 * _tolerance(twin))
    bound = min(MOST_ROUNDING, max(floor, 3 * rounding))
    found = _distances(gradients, plain)
    name = max(found, key=lambda n: float("inf") if found[n] != found[n] else found[n])
    if not _largest_over_ranks(found[name], world) <= bound:  # all ranks agree on the verdict
        raise WrongResultError(
            f"The nano twin's gradients in the first step differ from plain training's: `{name}` by "
            f"{found[name]:.3g} of its norm (L2), where rounding under `precision="
            f"{twin.precision.name}` explains {bound:.3g} at most: a technique or this hardware computes "
            "something else."
        )


def _distances(gradients: Named, plain: Named) -> dict[str, float]:
    """Return name -> |g - plain| / |plain|; a gradient that is missing counts as zero.

    Tensors whose gradient nearly vanishes are measured by the norm of an average one.
    """
    norms = {name: float(g.double().norm()) for name, g in plain.items()}
    least = 1e-2 * (sum(n * n for n in norms.values()) / len(norms)) ** 0.5
    apart = {}
    for name, wanted in plain.items():
        own = gradients.get(name)
        found = torch.zeros_like(wanted) if own is None else own.reshape(wanted.shape)
        apart[name] = float((found.double() - wanted.double()).norm()) / max(norms[name], least)
    return apart


def _largest_over_ranks(value: float, world: World) -> float:
    largest = torch.tensor(float("inf") if value != value else value, device=world.device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _train_twin(twin: CellSpec, world: World) -> tuple[list[float], Named]:
    """Train the parallelized twin; return its losses and the gradients of the first update."""
    trainer = parallelize(first_model(twin), twin, world)
    gradients: Named = {}

    def keep() -> None:
        """Keep averaged, unscaled and clipped gradients; a step repeated after an overflow, its last ones."""
        found = whole_tensors(trainer, trainer.gradient_of)
        # A later step overwrites the buckets of DDP.
        gradients.update({name: gradient.clone() for name, gradient in found.items()})

    if twin.optimizer == _plain_sgd(twin):
        # A tensor that is left over from an earlier step shows from the second one on. At first there
        # is a step that changes no weight, so that the gradients after it are those of the start.
        _take_step_without_update(
            trainer, _my_share(twin, *_global_batch(twin, STEPS, world), world)
        )
        trainer.before_update = keep
    losses = []
    for step in range(STEPS):
        images, labels = _global_batch(twin, step, world)
        loss = _step_that_counts(trainer, _my_share(twin, images, labels, world), step)
        losses.append(_mean_over_replicas(loss, world))
        trainer.before_update = None  # the first step is compared
    return losses, gradients


def _take_step_without_update(trainer: Trainer, micro_batches: list[MicroBatch]) -> None:
    groups = trainer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    _step_that_counts(trainer, micro_batches, STEPS)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _step_that_counts(trainer: Trainer, micro_batches: list[MicroBatch], step: int) -> torch.Tensor:
    """Repeat a step until no overflow skips its update; the loss is the same each time.

    A dynamic loss scale starts too high and halves until gradients fit float16.
    """
    for _ in range(HALVINGS):
        trainer.steps_taken = step
        loss = trainer.step(iter(micro_batches))
        if not (trainer.skipped and bool(trainer.skipped[-1])):
            break
    return loss


def _plain_losses(twin: CellSpec, world: World) -> list[float]:
    batches = [_global_batch(twin, step, world) for step in range(STEPS)]
    return plain_losses(replace(twin, optimizer=twin.optimizer.plain()), batches, world.device)


def _plain_sgd(cell: CellSpec) -> SGD:
    return SGD(
        name="plain SGD",
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        clip_norm=cell.optimizer.clip_norm,
        momentum=0.0,
        nesterov=False,
        implementation="loop",
    )


def _global_batch(twin: CellSpec, step: int, world: World) -> MicroBatch:
    """Images (B, C, H, W) and labels (B,) of all replicas, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * twin.seed + step)
    side, model = twin.batch.resolution_px, twin.model
    shape = (twin.images_per_step, *model.input_shape(side))
    images = torch.randn(shape, generator=generator)
    if model.head == "dense":
        labels = torch.randn((shape[0], model.num_classes, side, side), generator=generator)
    else:
        labels = torch.randint(model.num_classes, (shape[0],), generator=generator)
        images += _patterns(shape[1:], model.num_classes)[labels]  # something to learn
    return images.to(world.device), labels.to(world.device)


def _patterns(shape: tuple[int, ...], classes: int) -> torch.Tensor:
    return torch.randn((classes, *shape), generator=torch.Generator().manual_seed(0))


def _my_share(
    twin: CellSpec, images: torch.Tensor, labels: torch.Tensor, world: World
) -> list[MicroBatch]:
    replicas, index = world.data_parallel_size, world.data_parallel_rank
    mine = (images.chunk(replicas)[index], labels.chunk(replicas)[index])
    parts = twin.batch.accumulation_steps
    return list(zip(mine[0].chunk(parts), mine[1].chunk(parts), strict=True))


def _mean_over_replicas(loss: torch.Tensor, world: World) -> float:
    total = loss.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= world.size
    return float(total)


def _short(losses: list[float]) -> str:
    return "[" + ", ".join(f"{loss:.5f}" for loss in losses) + "]"
