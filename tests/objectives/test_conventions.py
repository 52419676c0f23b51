"""The loss is that of other sources on the same numbers, once time and sign are theirs."""

import torch
from torch import Tensor

from tests.objectives.test_flow_matching import DIT, cell
from vitsweep.objectives.base import Step
from vitsweep.objectives.positions import time_features


def fastvideo(
    x: Tensor, e: Tensor, sigma: Tensor, network_sees: Tensor, predicted: Tensor
) -> Tensor:
    """FastVideo, training pipeline: noise at sigma = 1, and the target points to it."""
    torch.testing.assert_close(network_sees, (1.0 - sigma) * x + sigma * e)
    return ((predicted - (e - x)) ** 2).mean()


def sit(x1: Tensor, x0: Tensor, t: Tensor, network_sees: Tensor, predicted: Tensor) -> Tensor:
    """SiT, transport/path.py, `ICPlan`: data at t = 1, and the network sees t itself."""
    torch.testing.assert_close(network_sees, t * x1 + (1 - t) * x0)
    return ((predicted - (x1 - x0)) ** 2).flatten(1).mean(1).mean()


def test_the_loss_is_that_of_fastvideo_and_of_sit() -> None:
    each = cell(1, *DIT)
    objective = each.objective.open(each)
    batch = objective.example(4, torch.Generator().manual_seed(0))
    at = Step(seed=0, number=0, total=None, first=0, num_images=4, device=torch.device("cpu"))
    given = objective.prepare(batch, at)
    x, e = batch["image"].double(), at.noise("noise", *batch["image"].shape).double()
    times = objective.times(at, 4)
    t = times.double().view(-1, 1, 1, 1)
    outputs = torch.randn(4, 2, 6, 6, dtype=torch.float64)

    loss = objective.loss(outputs, given, at)

    predicted = outputs[:, :1]
    torch.testing.assert_close(loss, fastvideo(x, e, t, given["image"], -predicted))
    torch.testing.assert_close(loss, sit(x, e, 1 - t, given["image"], predicted))
    told = time_features(1000 * times.double(), 256).float().double()
    torch.testing.assert_close(given["time"], told)
    # FastVideo's networks are told 1000 sigma as well; SiT's, whose times run the other way, 1 - t.


def test_noise_and_times_belong_to_an_image_however_images_are_dealt_out() -> None:
    each = cell(1, *DIT)
    objective = each.objective.open(each)
    batch = objective.example(8, torch.Generator().manual_seed(0))

    def at(first: int) -> Step:
        device = torch.device("cpu")
        return Step(seed=0, number=3, total=None, first=first, num_images=8, device=device)

    whole = objective.prepare(batch, at(0))
    for size in (1, 2, 4):
        for first in range(0, 8, size):
            own = {name: tensor[first : first + size] for name, tensor in batch.items()}
            for name, tensor in objective.prepare(own, at(first)).items():
                assert torch.equal(tensor, whole[name][first : first + size]), name
