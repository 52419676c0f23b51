"""FLOPs of a step of any objective, from a pass without values (needs torch)."""

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from vitsweep.model.build import build_model
from vitsweep.model.module_look import inputs_of
from vitsweep.objectives.base import Pair, Step, as_entries, at_least_float32
from vitsweep.spec.cell_spec import CellSpec

IMAGES = 2
"""Of the batch that is passed through: what an objective does once for all of them hardly counts."""


@cache
def counted(cell: CellSpec) -> tuple[int, int]:
    """Return the FLOPs of one image, forward and backward over all passes, and the number of parameters.

    `torch.utils.flop_counter` counts matrix products and attention, of the plain model.
    """
    objective = cell.objective.open(cell)
    with torch.device("meta"):  # where no weights are drawn
        network = build_model(cell)
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH), counter:
        weights = {
            name: torch.empty_like(held, device="cpu", requires_grad=held.requires_grad)
            for name, held in (*network.named_parameters(), *network.named_buffers())
        }
        step = Step(
            seed=0, number=0, total=None, first=0, num_images=IMAGES, device=torch.device("cpu")
        )
        batch = as_entries(objective.example(IMAGES, torch.Generator()))
        batch = objective.prepare(batch, step)
        images = (batch["image"],) if isinstance(batch, Pair) else ()
        by_name = {} if images else inputs_of(network, batch)
        if objective.momentum:
            seen = inputs_of(network, objective.of_teacher(batch))
            with torch.no_grad():
                batch = {**batch, "teacher": functional_call(network, weights, (), seen)}
        outputs = functional_call(network, weights, images, by_name)
        wide = tree_map_only(Tensor, at_least_float32, outputs)
        objective.loss(wide, batch, step).backward()
        parameters = sum(p.numel() for p in network.parameters())
    return counter.get_total_flops() // IMAGES, parameters
