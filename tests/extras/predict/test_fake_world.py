"""What is replaced of torch while a world is fake: all of it is there, does what it says, and comes back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from tests.cells import GPU_NODE, cell
from vitsweep.extras.predict.fake_world import SHIMS, Replica, fake_world
from vitsweep.model.precision import cast_floating
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import MeshShape

CPU = torch.device("cpu")


def sharded() -> CellSpec:
    return cell("sharding=hsdp", "mesh.shard=4", "resources.nodes=2", machine=GPU_NODE)


def test_torch_has_it_and_gets_it_back() -> None:
    for shim in SHIMS:
        original = getattr(shim.owner, shim.name)
        assert original is not shim.replacement
        assert len(shim.reason) > 20
        with fake_world(sharded(), CPU):
            assert getattr(shim.owner, shim.name) is shim.replacement
        assert getattr(shim.owner, shim.name) is original


def test_ddp_is_a_module_that_reduces_fake_gradients() -> None:
    with fake_world(cell("sharding=ddp"), CPU):
        replica = torch.nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        assert isinstance(replica, Replica)
        replica(torch.ones(2, 4)).sum().backward()
        assert replica.module.weight.grad is not None


def test_views_at_one_offset_have_one_address_and_others_another() -> None:
    with fake_world(cell(), CPU):
        buffer = torch.empty(8)
        assert buffer[2:].data_ptr() == buffer[2:].view(3, 2).data_ptr() != buffer.data_ptr()
        assert torch.empty(8).data_ptr() != buffer.data_ptr()
    with FakeTensorMode(), pytest.raises((RuntimeError, UserWarning)):
        torch.empty(8).data_ptr()


def test_a_model_on_the_meta_device_becomes_a_fake_one_of_another_dtype() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm2d(4)
    with fake_world(cell(), CPU):
        model.to_empty(device=CPU).to(torch.bfloat16)
        assert model.weight.device == CPU
        assert model.weight.dtype == model.running_mean.dtype == torch.bfloat16
        assert isinstance(model.weight, nn.Parameter)


def test_buffers_of_any_dtype_become_fake_and_tied_parameters_stay_tied() -> None:
    """RoPE's frequencies are complex, indices of windows are whole numbers."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model.register_buffer("frequencies", torch.zeros(4, dtype=torch.complex64))
        model.register_buffer("indices", torch.zeros(4, dtype=torch.int64))
    with fake_world(cell(), CPU):
        cast_floating(model.to_empty(device=CPU), torch.bfloat16)
        found = {name: (buffer.device, buffer.dtype) for name, buffer in model.named_buffers()}
        assert found == {"frequencies": (CPU, torch.complex64), "indices": (CPU, torch.int64)}
        assert model[1].weight is model[0].weight
        assert model[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (7, 4), (2, 4)])
def test_chunks_are_those_of_torch(rows: int, ranks: int) -> None:
    chunks: Any = next(shim.replacement for shim in SHIMS if shim.name == "_chunk_with_empty")
    tensor = torch.arange(rows * 3).view(rows, 3)
    mine, theirs = chunks(tensor, ranks, 0), _fsdp_param._chunk_with_empty(tensor, ranks, 0)
    for rank in range(ranks):
        assert mine[rank].tolist() == theirs[rank].tolist()


def test_parts_of_a_mesh_are_looked_up_among_fake_tensors() -> None:
    with fake_world(sharded(), CPU, rank=5) as world:
        assert isinstance(world.shape, MeshShape)
        part = world.mesh["shard"]
        assert (part.size(), part.get_local_rank()) == (4, 1)
        assert world.mesh["replicate", "shard"]._flatten().size() == world.size


def test_fsdp_shards_fake_parameters_over_a_part_of_the_world() -> None:
    from torch.distributed.fsdp import fully_shard

    with fake_world(sharded(), CPU) as world:
        model = fully_shard(nn.Linear(8, 8), mesh=world.mesh["shard"], reshard_after_forward=2)
        assert isinstance(model.weight, DTensor)
        assert model.weight.to_local().shape == (2, 8)
