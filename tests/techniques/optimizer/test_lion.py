"""Lion makes the steps of the paper's algorithm."""

import pytest
import torch

from tests.cells import cell
from tests.techniques.optimizer.test_implementations import loss, model, trained
from vitsweep.training.update import parameter_groups


def by_the_paper(steps: int = 5) -> torch.nn.Module:
    """Algorithm 2 of arXiv:2302.06675, number by number of each tensor."""
    net = model()
    momenta = [torch.zeros_like(p) for p in net.parameters()]
    decays = {id(p): g["weight_decay"] for g in parameter_groups(net, 0.3) for p in g["params"]}
    for step in range(steps):
        net.zero_grad()
        loss(net, step).backward()
        with torch.no_grad():
            for p, m in zip(net.parameters(), momenta, strict=True):
                c = 0.9 * m + (1 - 0.9) * p.grad
                p -= 0.01 * (torch.sign(c) + decays[id(p)] * p)
                m.copy_(0.99 * m + (1 - 0.99) * p.grad)
    return net


@pytest.mark.parametrize("implementation", ["loop", "foreach"])
def test_the_update_is_the_papers(implementation):
    found = trained("lion", implementation=implementation)
    for a, b in zip(by_the_paper().parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_it_holds_one_moment():
    net = model()
    optimizer = cell("optimizer=lion").optimizer.build(parameter_groups(net, 0.1))
    loss(net, 0).backward()
    optimizer.step()
    held = sum(t.numel() for s in optimizer.state.values() for t in s.values())
    assert held == sum(p.numel() for p in net.parameters())
