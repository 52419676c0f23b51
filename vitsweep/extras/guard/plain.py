"""The plain model's passes over each rank's own images, at a training's weights, and the memory they need."""

import time
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from vitsweep.collectives.primitives import gathered
from vitsweep.errors import VitsweepError
from vitsweep.extras.take_home.apply import Applied, copied
from vitsweep.model.initialize import Draws, plain_name
from vitsweep.model.module_look import differentiable, follow, outputs_of
from vitsweep.model.user_module import in_float32
from vitsweep.objectives.base import Batch, Pair, at_least_float32
from vitsweep.objectives.cross_entropy import number_of_images
from vitsweep.proof.checks import Bounds
from vitsweep.proof.faults import minus, norms_of, wide
from vitsweep.proof.reference import (
    HALF,
    ROUNDOFF,
    PlainModel,
    PlainStep,
    RoundingNoise,
    plain_model,
    step_of_all,
)
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.precision.full import FullPrecision
from vitsweep.training.shards import Named, whole_tensors

COPIES = 8
"""Float32 tensors of the whole model at once: its weights and gradients, and gradients that are compared."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What the plain model gives for the images of all ranks, in the cell's precision.

    Attributes:
        loss: mean over all ranks.
        gradients: of it.
        parts: of this rank's images alone; their mean over the ranks is `gradients`.
        noise: norm of what `RoundingNoise` changes of each gradient.
        loss_noise: by how much it may change the loss: the norm of the loss's gradient by the outputs, times
            that of the outputs' change. One change of a loss says little, since it may vanish by chance.
        outputs: of this rank's images.
        outputs_noise: norm of their change.
        in_float32: gradients in float32, of a cell in half precision.
        seconds: of each of this rank's passes, in which it waits for no other.
    """

    loss: float
    gradients: Named
    parts: Named
    noise: dict[str, float]
    loss_noise: float
    outputs: list[Tensor]
    outputs_noise: list[float]
    in_float32: Named
    seconds: list[float]


class PlainPasses:
    """The plain model of a training at today's weights and buffers.

    Args:
        training: after its first step, between two steps.
        batch: the first micro-batch of this rank.
    """

    def __init__(self, training: Applied, batch: Batch) -> None:
        self._training, self._trainer, self._batch = training, training.trainer, batch
        self._world, model = training.world, training.model
        self._cell = replace(
            training.cell, optimizer=replace(training.cell.optimizer, clip_norm=None)
        )
        self._weights = whole_tensors(self._trainer, lambda parameter: parameter)
        self._buffers = {plain_name(n): b for n, b in model.named_buffers()}
        self._objective = self._trainer.objective.reference()
        trained = [plain_name(n) for n, p in model.named_parameters() if p.requires_grad]
        self._trained = {name: self._weights[name] for name in trained}
        self._seconds: list[float] = []
        # by what `Trainer.gradients` divides, for the mean over ranks
        self._weight = 1.0
        if (objective := self._trainer.objective).reduction != "mean":
            [divisor] = objective.divisors([batch], self._world)
            is_sum = objective.reduction == "sum"
            self._weight = float((objective.count(batch) if is_sum else 1) / divisor)

    def run(self) -> Plain:
        """Run all passes; every rank calls it."""
        cell = self._cell
        plan, bounds = cell.precision.plan(), Bounds(cell, self._world)
        model = self._model(cell)
        plain, outputs = self._step(model)
        noisy, changed, in_float32 = plain, outputs, None
        if not bounds.is_exact:
            number = self._trainer.steps_taken * self._world.size + self._world.rank
            with RoundingNoise(number, ROUNDOFF[torch.float16] if plan.tf32 else 0.0):
                noisy, changed = self._step(model)
        del model
        if getattr(torch, plan.autocast_dtype or plan.param_dtype) in HALF:
            exact = FullPrecision(name="float32", dtype="float32", tf32=False)
            in_float32, _ = self._step(self._model(replace(cell, precision=exact)))
        before, after = ([t.detach() for t in differentiable(each)] for each in (outputs, changed))
        moved = [float((wide(a) - wide(b)).norm()) for a, b in zip(after, before, strict=True)]
        slopes = self._slopes(outputs)
        loss_noise = abs(float(noisy.loss - plain.loss)) + sum(map(float.__mul__, slopes, moved))
        numbers = gathered([float(plain.loss) * self._weight, loss_noise * self._weight])
        loss, loss_noise = (sum(column) / len(numbers) for column in zip(*numbers, strict=True))
        gradients = self._mean(plain)
        return Plain(
            loss=loss,
            gradients=gradients,
            parts={n: g * self._weight for n, g in plain.gradients.items()},
            noise=norms_of(minus(self._mean(noisy), gradients)),
            loss_noise=loss_noise,
            outputs=before,
            outputs_noise=moved,
            in_float32=self._mean(in_float32) if in_float32 else {},
            seconds=self._seconds,
        )

    def _model(self, cell: CellSpec) -> PlainModel:
        device, copy = self._world.device, self._training.bare
        module = plain_model(cell, device) if copy is None else copied(copy, device)
        vars(module)["draws"] = Draws(cell.seed)
        plain = PlainModel(cell, device, False, module)
        plain.objective = self._objective
        follow(plain.model, self._training.model)
        return plain

    def _step(self, plain: PlainModel) -> tuple[PlainStep, Any]:
        """Return what a pass gives, and what the model returned."""
        seen, begun = list[Any](), time.monotonic()
        with plain.model.register_forward_hook(lambda module, given, found: seen.append(found)):
            step = plain.step(
                self._weights,
                self._buffers,
                self._batch,
                self._trainer.steps_taken,
                replica=self._world.data_parallel_rank,
            )
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        self._seconds.append(time.monotonic() - begun)
        return step, tree_map_only(Tensor, _as_leaf, seen[-1])

    def _slopes(self, outputs: Any) -> list[float]:
        """Return norms of the loss's gradient by each tensor of the outputs."""
        wanted = differentiable(outputs)
        at = step_of_all(self._cell, self._batch, self._trainer.steps_taken)
        loss = self._objective.loss(outputs, self._batch, at)
        if self._objective.reduction == "sum":
            loss = loss / self._objective.count(self._batch)
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [0.0 if g is None else float(wide(g).norm()) for g in found]

    def _mean(self, step: PlainStep) -> Named:
        """Return the mean gradients over all ranks, tensor by tensor; a missing one counts as zero."""
        found = {}
        for name, weight in self._trained.items():
            own = step.gradients.get(name)
            total = (
                torch.zeros_like(weight, dtype=torch.float32) if own is None else own * self._weight
            )
            if self._world.size > 1:
                dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total)
                total /= self._world.size
            found[name] = total
        return found


def _as_leaf(tensor: Tensor) -> Tensor:
    return at_least_float32(tensor.detach()).requires_grad_(tensor.requires_grad)


def require_memory(training: Applied, batch: Batch) -> None:
    """Ask all ranks for the memory of a check; every rank calls it.

    Raises:
        VitsweepError: the rank with the least has too little.
    """
    world, copy = training.world, training.bare
    with torch.device("meta"):
        plain = plain_model(training.cell, torch.device("meta")) if copy is None else copied(copy)
        vars(plain)["draws"] = Draws(training.cell.seed)
    weights = sum(p.numel() for p in plain.parameters())
    needed = 4.0 * COPIES * weights + _kept_for_backward(plain, batch)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        free = float(torch.cuda.mem_get_info(world.device)[0])
    else:
        free = psutil.virtual_memory().available / training.cell.resources.ranks_per_node
    ranks = gathered([needed, free])
    least = min(ranks, key=lambda rank: rank[1] - rank[0])
    if least[0] > least[1]:
        rank = ranks.index(least)
        raise VitsweepError(
            f"`vitsweep.check` of {number_of_images(batch)} images needs {least[0] / GIB:.2f} GiB for the "
            f"plain model, which keeps all activations, and rank {rank} has {least[1] / GIB:.2f} GiB "
            "free: give it a smaller batch."
        )


def _kept_for_backward(plain: nn.Module, batch: Batch) -> int:
    """Return the bytes that a forward pass in float32 keeps; 0 of a module that does not run on `meta`."""
    seen: dict[StorageWeakRef, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    shapes = tree_map_only(Tensor, lambda t: in_float32(t).to("meta"), batch)
    given = tuple(shapes.values()) if isinstance(batch, Pair) else shapes
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = outputs_of(plain.float(), given)
    except Exception:  # of the user's module, or of an operation that `meta` lacks
        return 0
    del outputs
    return sum(seen.values())
