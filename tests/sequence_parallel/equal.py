"""One pass of a parallelized model beside the plain one: outputs and gradients by name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.equivalence import whole_weights
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.prove import _global_batch
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.reference import plain_model
from vitsweep.world import World


def pass_differences(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    """Return the largest absolute difference of output, input gradient and weight gradients.

    All replicas see the same images, so that one plain pass is what each of them must give.
    """
    return [_difference(world, cell) for cell in cells]


def _difference(world: World, cell: CellSpec) -> dict[str, float]:
    images, labels = _global_batch(cell, 0, world)
    wanted, wanted_input, wanted_gradients = _plain_pass(cell, images, labels, world)
    torch.manual_seed(cell.seed)
    trainee = parallelize(build_model(cell).to(world.device), cell, world)
    own = images.double().requires_grad_()
    output = trainee.model(own)
    loss = torch.nn.functional.cross_entropy(output, labels)
    loss.backward()
    assert own.grad is not None
    dist.all_reduce(own.grad)
    own.grad /= world.size  # every rank's input has the gradient of its own tokens
    gradients = whole_weights((n, p.grad) for n, p in trainee.model.named_parameters())
    return {
        "output": _apart(output, wanted),
        "input": _apart(own.grad, wanted_input),
        "weights": max(_apart(gradients[n], g) for n, g in wanted_gradients.items()),
        "scale": max(float(g.abs().max()) for g in wanted_gradients.values()),
    }


def _plain_pass(cell: CellSpec, images: Tensor, labels: Tensor, world: World) -> tuple[Any, ...]:
    plain = plain_model(cell, world.device).double()
    inputs = images.double().requires_grad_()
    output = plain(inputs)
    torch.nn.functional.cross_entropy(output, labels).backward()
    gradients = whole_weights((n, p.grad) for n, p in plain.named_parameters())
    return output, inputs.grad, gradients


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max())
