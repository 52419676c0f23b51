from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.techniques.optimizer.test_implementations import chosen, loss, model, trained
from vitsweep.training.update import parameter_groups


@pytest.fixture
def process_group(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("static_graph", [False, True])
def test_ddp_leaves_the_views_in_place(process_group, static_graph):
    net = DistributedDataParallel(model(), static_graph=static_graph)
    flat = chosen("adamw_contiguous", learning_rate=0.01)
    optimizer = flat.build(parameter_groups(net, 0.3))
    for step in range(5):
        loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    for a, b in zip(trained("adamw_loop").parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_gradients_in_the_buckets_of_ddp_are_refused_at_the_step(process_group):
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = chosen("adamw_contiguous").build(parameter_groups(net, 0.3))
    loss(net, 0).backward()

    with pytest.raises(RuntimeError, match="gradient_as_bucket_view=True"):
        optimizer.step()
