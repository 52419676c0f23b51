"""What a step gives: found by a twin with its techniques, and expected by the reference model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitsweep.collectives.primitives import gathered
from vitsweep.model.build import first_model
from vitsweep.model.initialize import draw_zeros, plain_name
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.parallelize import parallelize
from vitsweep.proof.faults import minus, norms_of, wide
from vitsweep.proof.reference import ROUNDOFF, PlainModel, PlainStep, RoundingNoise
from vitsweep.proof.twin import STEPS, mean_over_replicas, my_share, step_that_counts
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import Named, whole_tensors
from vitsweep.training.trainer import MicroBatch
from vitsweep.world import World

DRAWS = 4
"""Of noise, where a loss couples images: in its few directions one draw may be nearly zero by chance."""


@dataclass(kw_only=True)
class Evidence:
    """What checks compare, before the first step or of one: whole tensors, by the reference model's names.

    Attributes:
        step: counted from 0.
        loss: mean over the batch of all replicas.
        gradients: averaged, unscaled and clipped.
        noise: norm of what `RoundingNoise` changes of each gradient; drawn in the first step. Where a loss
            couples images it is the largest of `DRAWS`, in each step.
        buffers: as the first replica leaves them; other replicas may be given its own.
        before: weights that the optimizer updates, before the step.
        weights: the same after it.
        read: weights that the next forward pass reads.
        repeats: how often an overflow skipped the update, until the loss scale fitted.
        averaged: gathers the weights that evaluation would read; every rank calls it.
    """

    step: int = 0
    loss: float = 0.0
    gradients: Named = field(default_factory=Named)
    noise: dict[str, float] = field(default_factory=dict)
    buffers: Named = field(default_factory=Named)
    before: Named = field(default_factory=Named)
    weights: Named = field(default_factory=Named)
    read: Named = field(default_factory=Named)
    repeats: int = 0
    averaged: Callable[[], Named] = Named

    def loss_apart(self, expected: "Evidence") -> float:
        """Return the relative difference of losses; 0 of equal ones, of a surrogate that is always 0 too."""
        apart = abs(self.loss - expected.loss)
        return apart / (abs(expected.loss) or 1e-300) if apart else 0.0


class TrainedTwin:
    """A twin, wrapped by all of its techniques.

    Args:
        twin: in the precision in which it is trained.
        world: its ranks.
    """

    def __init__(self, twin: CellSpec, world: World) -> None:
        model = first_model(twin)
        if isinstance(twin.model, ModuleSpec):
            draw_zeros(model, twin.seed)
        self._trainer, self._twin, self._world = parallelize(model, twin, world), twin, world

    def now(self) -> Evidence:
        """Return what the twin has, without what a step gives."""
        weights, model = self._weights(), self._trainer.model
        read = {n: w.clone() for n, w in whole_tensors(self._trainer, lambda p: p).items()}
        buffers = {plain_name(n): b.clone() for n, b in model.named_buffers()}
        return Evidence(weights=weights, read=read, buffers=buffers, averaged=self._averages)

    def step(self, batch: MicroBatch, step: int, before: Named) -> Evidence:
        """Take one step on this rank's share of a batch, from these weights that the optimizer updates."""
        trainer, gradients, skipped = self._trainer, Named(), len(self._trainer.skipped)

        def keep() -> None:
            """Keep what the update reads; of a step repeated after an overflow, its last gradients."""
            found = whole_tensors(trainer, trainer.gradient_of)
            gradients.update({name: gradient.clone() for name, gradient in found.items()})

        trainer.before_update = keep
        loss = step_that_counts(trainer, my_share(self._twin, batch, self._world), step)
        mean, repeats = mean_over_replicas(loss, self._world), len(trainer.skipped) - skipped - 1
        found = self.now()
        found.step, found.loss, found.gradients, found.before = step, mean, gradients, before
        found.repeats = max(0, repeats)
        return found

    def _weights(self) -> Named:
        trainer = self._trainer

        def master(parameter: nn.Parameter) -> Tensor:
            return trainer.masters.of(parameter) if trainer.masters else parameter

        def held(parameter: nn.Parameter) -> Tensor | None:
            whole = trainer.cell.sharding.gradient_of(trainer.model, parameter, master)
            # ZeRO-1 joins slices in float32
            return whole if whole is None or trainer.masters else whole.to(parameter.dtype)

        with torch.no_grad():
            return {n: w.clone() for n, w in whole_tensors(trainer, held).items()}

    def _averages(self) -> Named:
        with self._trainer.averaged_weights():
            return self._weights()


class Reference:
    """The reference model of a twin, in its precision.

    Args:
        twin: gives it.
        world: its ranks.
        in_parts: whether batches are computed in the parts that ranks see.

    Attributes:
        plain: the model, without techniques.
        in_parts: the same.
    """

    def __init__(self, twin: CellSpec, world: World, in_parts: bool) -> None:
        self._twin, self._world, self.in_parts = twin, world, in_parts
        self.plain, self._plan = PlainModel(twin, world.device, in_parts), twin.precision.plan()
        self._is_exact = self._plan.param_dtype == "float64"
        self._teacher: Named = {}

    def first(self) -> Evidence:
        """Return what training begins with, no copies; of buffers those of a user's module.

        Others are constants, which each step takes from the twin.
        """
        model, is_own = self.plain.model, isinstance(self._twin.model, ModuleSpec)
        buffers = {plain_name(n): b for n, b in model.named_buffers() if is_own}
        read = {n: p.detach() for n, p in self.plain.named_parameters().items()}
        return Evidence(read=read, buffers=buffers)

    def step(self, weights: Named, buffers: Named, batch: MicroBatch, found: Evidence) -> Evidence:
        """Return what a step at these weights gives: the first rank computes it, the last ones the noise.

        Args:
            weights: that forward passes read.
            buffers: before the step.
            batch: of all replicas.
            found: what the twin's step gave, whose weights a teacher follows afterwards.
        """
        step, teacher = found.step, self._taught_by(found)
        rank, size, noisy = self._world.rank, self._world.size, list[Named]()
        # views become alike as they are trained: what rounding does to their differences grows
        draws = DRAWS if self._twin.objective.couples_images else int(step == 0)
        plain = self.plain.step(weights, buffers, batch, step, teacher) if rank == 0 else None
        for draw in range(size - 1 - rank, 0 if self._is_exact else draws, size):
            least = ROUNDOFF[torch.float16] if self._plan.tf32 else 0.0
            with RoundingNoise(step + STEPS * draw, least):
                noisy.append(self.plain.step(weights, buffers, batch, step, teacher).gradients)
        plain = self._shared(plain)
        loss, wanted = float(plain.loss), plain.gradients
        drawn = [d for rank in gathered([norms_of(minus(g, wanted)) for g in noisy]) for d in rank]
        noise = {n: max(norms.get(n, 0.0) for norms in drawn) for n in wanted if drawn}
        return Evidence(loss=loss, gradients=wanted, noise=noise, buffers=plain.buffers)

    def _taught_by(self, found: Evidence) -> Named:
        """Return a teacher's weights in a step, by their equation; each skipped update averages again."""
        if not (momentum := self.plain.objective.momentum):
            return {}
        decay, seen = momentum(found.step, None), self._teacher or found.before

        def followed(weights: Named) -> Named:
            return {n: decay * wide(t) + (1 - decay) * wide(weights[n]) for n, t in seen.items()}

        for _ in range(found.repeats):
            seen = followed(found.before)
        self._teacher = followed(found.weights)
        return seen

    def _shared(self, found: PlainStep | None) -> PlainStep:
        """Send a reference step from the first rank, which computed it, to all others."""
        if not dist.is_initialized() or self._world.size == 1:
            assert found is not None
            return found
        shapes = {n: p for n, p in self.plain.named_parameters().items() if p.requires_grad}
        dtype = torch.float64 if self._is_exact else torch.float32
        if any(p.is_complex() for p in shapes.values()):
            dtype = torch.promote_types(dtype, torch.complex64)
        packed = torch.zeros(1 + sum(p.numel() for p in shapes.values()), dtype=dtype)
        packed = packed.to(self._world.device)
        if found is not None:
            none = torch.zeros((), dtype=dtype, device=self._world.device)
            grads = [found.gradients.get(n, none).expand(p.shape) for n, p in shapes.items()]
            packed = torch.cat([t.reshape(-1).to(dtype) for t in (found.loss, *grads)])
        dist.broadcast(torch.view_as_real(packed) if dtype.is_complex else packed, 0)
        loss, *parts = packed.split([1, *(p.numel() for p in shapes.values())])
        pairs = zip(shapes.items(), parts, strict=True)
        gradients = {n: (g if p.is_complex() else g.real).view(p.shape) for (n, p), g in pairs}
        return found or PlainStep(loss[0].real, gradients, {})
