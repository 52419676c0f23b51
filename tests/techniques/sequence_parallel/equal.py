"""Parallelized models beside plain ones: outputs, gradients by name, losses and weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.equivalence import STEPS, Plain, trained_plainly
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.reference import plain_model
from vitsweep.proof.twin import global_batch, mean_over_replicas, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import whole_tensors
from vitsweep.training.trainer import Trainer
from vitsweep.world import World


def pass_differences(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    """Return the largest absolute difference of output, input gradient and weight gradients.

    All replicas see the same images, so that one plain pass is what each of them must give. Only rank 0
    compares; the others' answers are empty.
    """
    return _of_each(cells, lambda cell: _pass_difference(world, cell))


def training_differences(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    """Train each cell and its plain twin for some steps; return the largest differences, on rank 0."""
    plain: Plain = {}
    return _of_each(cells, lambda cell: _training_difference(world, cell, plain))


def _of_each(
    cells: list[CellSpec], difference: Callable[[CellSpec], dict[str, float]]
) -> list[dict[str, float]]:
    answers = [_named(cell, lambda cell=cell: difference(cell)) for cell in cells]
    dist.barrier()  # rank 0 compares longer: a rank that left would cut its last collective
    return answers


def _named(cell: CellSpec, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    try:
        return run()
    except Exception as error:
        error.add_note(str({g: t.name for g, t in cell.techniques.items()}))
        raise


def _pass_difference(world: World, cell: CellSpec) -> dict[str, float]:
    images, labels = global_batch(cell, 0, world).values()
    trainer = _trainer(cell, world)
    own_input = images.double().requires_grad_()
    output = trainer.model(own_input)
    nn.functional.cross_entropy(output, labels).backward()
    cell.sequence_parallel.complete_gradients(trainer.model, world)
    assert own_input.grad is not None
    dist.all_reduce(own_input.grad)
    own_input.grad /= world.size  # every rank's input has the gradient of its own tokens
    gradients = whole_tensors(trainer, lambda p: p.grad)
    if world.rank:
        return {}
    plain = plain_model(cell, world.device).double()
    plain_input = images.double().requires_grad_()
    wanted = plain(plain_input)
    nn.functional.cross_entropy(wanted, labels).backward()
    references = {n: p.grad for n, p in plain.named_parameters()}
    return {
        "output": _apart(output, wanted),
        "input": _apart(own_input.grad, plain_input.grad),
        "weights": max(_apart(gradients[n], g) for n, g in references.items()),
        "scale": max(float(g.abs().max()) for g in references.values()),
    }


def _training_difference(world: World, cell: CellSpec, plain: Plain) -> dict[str, float]:
    batches = [global_batch(cell, step, world) for step in range(STEPS)]
    trainer = _trainer(cell, world)
    losses = [
        mean_over_replicas(trainer.step(iter(my_share(cell, batch, world))), world)
        for batch in batches
    ]
    weights = whole_tensors(trainer, lambda p: p)
    if world.rank:
        return {}
    wanted, references = trained_plainly(cell, batches, world, plain)
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)),
        "weights": max(_apart(weights[n], p) for n, p in references.items()),
        "moved": abs(wanted[-1] - wanted[0]),
    }


def _trainer(cell: CellSpec, world: World) -> Trainer:
    torch.manual_seed(cell.seed)
    return parallelize(build_model(cell).to(world.device), cell, world)


def _apart(a: Tensor, b: Any) -> float:
    return float((a.detach().reshape(-1) - b.detach().reshape(-1)).abs().max())
