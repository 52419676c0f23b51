"""The nano twin of a cell, what it trains on, and each rank's share of that."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from math import lcm, prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vitsweep.errors import VitsweepError
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.model.user_module import example_of
from vitsweep.proof.optimizer_definitions import EQUATIONS
from vitsweep.proof.reference import cut, is_cut, look_at_parts, shares_of
from vitsweep.spec.cell_spec import Batch, CellSpec
from vitsweep.spec.from_yaml import part_from_tree
from vitsweep.spec.menu import content_of, plain_choice
from vitsweep.spec.model_spec import MEAN_OVER_PARTS, TransformerSpec, least_alike
from vitsweep.spec.model_variant import Averaging, ModelVariant
from vitsweep.spec.rules import technique_conflicts
from vitsweep.spec.technique import AttentionKernel, Technique
from vitsweep.techniques.attention.sdpa import HALF_ONLY
from vitsweep.techniques.precision.full import FullPrecision
from vitsweep.training.trainer import MicroBatch, Trainer
from vitsweep.world import World

STEPS = 4
"""Optimizer steps of a twin."""
LEAST_SIDE, TILE = 8, 64
"""Patches along a side of the twin's images, unless the cell has fewer: more tokens than a tile of keys."""
IN_PARTS = "the reference computes in parts, on which outputs or buffers depend"
"""What `proved` says where a whole batch would give something else, as under BatchNorm."""
CLIP = "optimizer.clip_norm"
HALVINGS = 20
"""Overflows in a row until a dynamic loss scale is low enough: from 2**16 to below 1."""


def twin_of(cell: CellSpec) -> CellSpec:
    """Return the cell with a nano model and a few images per replica, everything else kept.

    Images, widths and classes have the remainders of the cell's, so that what is padded there is padded here.
    FP8 products need a number of rows divisible by 16 (MXFP8: 32): so many computed images are, whatever the
    tokens.
    """
    ranks = lcm(cell.mesh.gradient_shares, cell.mesh.tensor)
    multiple = cell.precision.multiple
    unit = lcm(ranks, multiple)
    classes = least_alike(cell.model.num_classes, max(16, cell.mesh.data_parallel_size), ranks)
    model = cell.model.twin(depth=max(3, cell.mesh.pipeline + 1), num_classes=classes, unit=unit)
    parts = cell.pipeline_parallel.microbatches
    least = max(cell.vit_block.least_images, cell.tokens.least_images)
    # Of one forward pass.
    images = least_alike(cell.images_per_forward, max(-(-4 // parts), least), 4)
    if cell.precision.float8:
        images = next(
            n for n in count(max(multiple, least)) if cell.vit_block.kept(n) % multiple == 0
        )
    batch = Batch(
        name="twin",
        images_per_step=parts * images * cell.batch.accumulation_steps,
        scope="per_replica",
        accumulation_steps=cell.batch.accumulation_steps,
        resolution_px=cell.model.twin_resolution_px or cell.batch.resolution_px,
    )
    # torch's compiler takes no buckets below 1 MiB, which a nano model does not fill
    compiled = cell.compilation.scope != "nothing"
    sharding = cell.sharding if compiled else cell.sharding.of_twin()
    twin = replace(cell, model=model, batch=batch, objective=cell.objective.twin())
    twin = replace(twin, precision=cell.precision.of_twin(), sharding=sharding)
    return _padded_alike(twin, cell)


def _padded_alike(twin: CellSpec, cell: CellSpec) -> CellSpec:
    """Return the twin with images on which it pads tokens as the cell does; at most those of the cell.

    Sequences have the same remainder as the cell's modulo all degrees that share tokens, and more
    than `TILE` tokens where the cell has as many.
    """
    if not isinstance(twin.model, TransformerSpec) or not isinstance(cell.model, TransformerSpec):
        return twin
    unit = 2 * lcm(cell.mesh.ring, cell.mesh.ulysses, cell.mesh.sequence, cell.mesh.tensor)
    pooling, own_px, patch = cell.classifier.pooling, cell.batch.resolution_px, cell.model.patch_px
    wanted = cell.shape.sequence_lengths(own_px, pooling)  # type: ignore[attr-defined]
    for side in range(min(LEAST_SIDE * patch, own_px), own_px, patch):
        smaller = replace(twin, batch=replace(twin.batch, resolution_px=side))
        found = smaller.transformer.sequence_lengths(side, pooling)
        alike = all((f - w) % unit == 0 for f, w in zip(found, wanted, strict=True))
        if alike and TILE not in found:
            return smaller
    return replace(twin, batch=replace(twin.batch, resolution_px=own_px))


def exact_twin(twin: CellSpec) -> CellSpec:
    """Return the twin with all of its techniques in float64, or in float32 where that may be missing.

    What only half precision has is replaced: flash kernels of a GPU, and gradients that are exchanged in it.
    """
    on_gpu = twin.resources.device == "cuda"
    may_lack_it = on_gpu or twin.model.norms_over_batch
    is_there = twin.precision.plan().param_dtype == "float64"
    dtype: Literal["float32", "float64"] = "float32" if may_lack_it and not is_there else "float64"
    exact = FullPrecision(name=dtype, dtype=dtype, tf32=False)
    is_exact = twin.precision.plan() == exact.plan()
    changed: dict[str, Any] = {"precision": twin.precision if is_exact else exact}
    if getattr(twin.sharding, "gradient_dtype", None):
        changed["sharding"] = replace(twin.sharding, gradient_dtype=None)  # type: ignore[call-arg]
    if on_gpu and getattr(twin.attention, "backend", None) in HALF_ONLY:
        changed["attention"] = replace(twin.attention, backend="math")  # type: ignore[call-arg]
    return replace(twin, **changed)


def without(twin: CellSpec, knobs: Iterable[str]) -> CellSpec | None:
    """Return the twin with plain choices in the same ranks; those that shared an image see different ones.

    Args:
        twin: in any precision.
        knobs: groups whose plain choice replaces that of the twin; `CLIP` clips nothing.

    Returns:
        None where a choice is the plain one, or another one of the twin needs it.
    """
    changed: dict[str, Any] = {}
    for knob in knobs:
        group = knob.partition(".")[0]
        choice = changed.get(group, getattr(twin, group))
        plain = replace(choice, clip_norm=None) if knob == CLIP else _plain(twin, group)
        if plain == choice:
            return None
        changed[group] = plain
    kept = {axis for g, t in twin.techniques.items() if g not in changed for axis in t.axes}
    freed = {axis for g in changed for axis in twin.techniques[g].axes} - kept
    taker = "shard" if "shard" in kept and twin.mesh.replicate == 1 else "replicate"
    ranks = prod(getattr(twin.mesh, axis) for axis in (taker, *freed))
    mesh = replace(twin.mesh, **dict.fromkeys(freed, 1) | {taker: ranks})
    found = replace(twin, mesh=mesh, **changed)
    return found if {*technique_conflicts(found)} <= {*technique_conflicts(twin)} else None


def _plain(twin: CellSpec, group: str) -> Any:
    """Return what the baseline would have of a group; of an optimizer its plainest implementation."""
    if group == "optimizer":
        return twin.optimizer.plain()
    shares = twin.mesh.gradient_shares
    name = "none" if group == "sharding" and shares == 1 else plain_choice(group)
    settings = {**content_of(group, name), "name": name}
    if "gradient_as_bucket_view" in settings:  # auto, which follows from the optimizer
        settings["gradient_as_bucket_view"] = not twin.optimizer.keeps_gradient_views
    plain = part_from_tree({group: settings}, group)
    return plain.of_twin() if group == "sharding" else plain


def global_batch(twin: CellSpec, step: int, world: World) -> MicroBatch:
    """Images (B, C, H, W) and labels (B,), or a mapping, of all shares, the same on every rank."""
    number = twin.images_per_step // twin.mesh.data_parallel_size * shares_of(twin)
    if isinstance(twin.model, ModuleSpec) and twin.model.twin_batch:
        px, seed = twin.batch.resolution_px, 1000 * twin.seed + step
        batch = example_of(twin.model, number, px, seed)
        return tree_map_only(Tensor, lambda tensor: tensor.to(world.device), batch)
    generator = torch.Generator().manual_seed(1000 * twin.seed + step)
    batch = twin.objective.open(twin).example(number, generator)
    return tree_map_only(Tensor, lambda tensor: tensor.to(world.device), batch)


@dataclass(frozen=True)
class Parts:
    """How the reference model computes a batch.

    Attributes:
        are_computed: in the parts that ranks see, and not whole.
        are_rounded: whether it does so where the cell has fewer digits than the exact twin.
        told: what `proved` reports of that.
    """

    are_computed: bool
    are_rounded: bool
    told: tuple[str, ...] = ()

    @property
    def rounded(self) -> "Parts":
        """The same in the cell's own precision."""
        return replace(self, are_computed=self.are_rounded)


def parts_of(twin: CellSpec, world: World) -> Parts:
    """Look at whether whole batches give what their parts give: of a module of the user's, by computing both.

    Args:
        twin: in float64, or float32 where that may be missing.
        world: its ranks, which all find the same.

    Raises:
        VitsweepError: the loss with a count is no sum.
    """
    model = twin.model
    loss, count = twin.loss_function, twin.loss_count
    if twin.objective.couples_images:
        return Parts(False, False)
    parts = shares_of(twin) * twin.batch.accumulation_steps * twin.pipeline_parallel.microbatches
    if parts == 1 and (not isinstance(model, ModuleSpec) or count):
        return Parts(False, False)
    if not isinstance(model, ModuleSpec):
        depends = model.norms_over_batch or twin.vit_block.draws or twin.tokens.draws
        return Parts(is_cut(twin), is_cut(twin), (IN_PARTS,) * depends)
    batches = (global_batch(twin, step, world) for step in range(STEPS))
    alike, adds_up = look_at_parts(twin, world.device, batches, parts)
    if count and not adds_up:
        raise VitsweepError(
            f"`objective.target={loss}` returned for the twin's whole batch not the sum over its parts, and "
            f"with `objective.count={count}` it must be a sum: return `losses.sum()`."
        )
    mean = (MEAN_OVER_PARTS,) * (not adds_up)
    if parts == 1:
        return Parts(False, False, mean)
    told = (IN_PARTS,) * (not alike) + mean
    # The sum of two has one order; in half precision those of a module round in each part.
    return Parts(parts == 2 or bool(told), True, told)


def my_share(twin: CellSpec, batch: MicroBatch, world: World) -> list[MicroBatch]:
    """Return this rank's micro-batches of a batch of all shares."""
    replicas, shares = world.data_parallel_size, shares_of(twin)
    mine = cut(batch, shares)[_share_of_replicas(replicas, shares)[world.data_parallel_rank]]
    return cut(mine, twin.batch.accumulation_steps)


def _share_of_replicas(replicas: int, shares: int) -> list[int]:
    """Return which share each replica computes: each equally often, and the first replica the first one.

    They come in no order, so that no node or other group of ranks has the mean of all.
    """
    if shares == replicas:
        return [*range(replicas)]
    order = torch.randperm(replicas, generator=torch.Generator().manual_seed(0)) % shares
    found: list[int] = ((order - order[0]) % shares).tolist()
    return found


def mean_over_replicas(loss: Tensor, world: World) -> float:
    """Return the mean of a loss () over all ranks."""
    total = loss.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= world.size
    return float(total)


def not_proved(cell: CellSpec) -> list[str]:
    """Return the choices of a cell of which the proof does not see all."""
    known = type(cell.averaging) is Averaging or cell.averaging.checks()
    found = [] if known else [f"averaging={cell.averaging.name}"]
    own = {g: t.name for g, t in cell.techniques.items() if _is_compared_with_itself(t)}
    found += [f"{group}={name}, which is compared with itself" for group, name in own.items()]
    objective = cell.objective.open(cell)
    if not cell.loss_function and objective.reference() is objective:
        found.append(f"objective={cell.objective.title}, whose loss is compared with itself")
    if cell.objective.draws:
        found.append(
            f"random numbers and schedules of objective={cell.objective.title}, which its reference shares"
        )
    if cell.task.epochs:
        found.append(f"task={cell.task.name} after the timed steps")
    if type(cell.optimizer.plain()) not in EQUATIONS:
        found.append(f"optimizer={cell.optimizer.name}, which is compared with its own `plain`")
    return found


def _is_compared_with_itself(choice: Technique) -> bool:
    """Whether a choice changes the model and brings no reference code of the same."""
    no_code = type(choice).plain_twin in (ModelVariant.plain_twin, AttentionKernel.plain_twin)
    does_nothing = getattr(type(choice), "apply", None) is ModelVariant.apply  # a shape alone
    return choice.changes_model and no_code and not does_nothing


def step_that_counts(trainer: Trainer, micro_batches: list[MicroBatch], step: int) -> Tensor:
    """Repeat a step until no overflow skips its update; the loss is the same each time.

    A dynamic loss scale starts too high and halves until gradients fit float16.
    """
    for _ in range(HALVINGS):
        trainer.steps_taken = step
        loss = trainer.step(iter(micro_batches))
        skipped = trainer.skipped[-1].clone() if trainer.skipped else torch.zeros(())
        if trainer.skipped and dist.is_initialized():  # so that all ranks take as many steps
            dist.all_reduce(skipped, dist.ReduceOp.MAX)
        if not bool(skipped):
            break
    return loss
