"""One rank of a large world in one process: fake tensors and a process group that sends nothing.

Needs torch. Replaced while it lasts is only what fake tensors cannot stand for; all else is what a run
executes.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import debug as tensor_debug
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from vitsweep.predict.replica import Replica
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World, device_mesh

POST_FORWARD = "_get_post_forward_mesh_info"
"""Function of FSDP2 (private to torch) that makes the mesh of `reshard_after_forward=<number>`."""


@contextmanager
def fake_world(cell: CellSpec, device: torch.device, rank: int = 0) -> Iterator[World]:
    """Yield one rank of the cell's world; tensors made inside are fake."""
    size = cell.resources.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        world = World(
            rank=rank,
            local_rank=rank % cell.resources.ranks_per_node,
            size=size,
            device=device,
            shape=cell.mesh,
            mesh=device_mesh(device.type, cell.mesh),  # its own tensors must be real
        )
        with _replaced(), FakeTensorMode(allow_non_fake_inputs=True):
            yield world
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Empty DTensor's cache, whose entries name process groups of the world that has ended."""
    clear = getattr(
        tensor_debug, "_clear_sharding_prop_cache", None
    )  # private, not in all versions
    if clear is not None:
        clear()


@contextmanager
def _replaced() -> Iterator[None]:
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for target, name, replacement in (
            (torch.nn.parallel, "DistributedDataParallel", Replica),
            (pipelining.stage, "DistributedDataParallel", Replica),
            (FakeTensor, "data_ptr", _address),
            (nn.Module, "to", _cast(nn.Module.to)),
            (nn.Module, "to_empty", _empty(nn.Module.to_empty)),
            (_fsdp_param, "_chunk_with_empty", _Chunks),
            (DeviceMesh, "_flatten", _on_real_tensors(DeviceMesh._flatten)),
            (DeviceMesh, "__getitem__", _on_real_tensors(DeviceMesh.__getitem__)),
            (_fully_shard, POST_FORWARD, _on_real_tensors(getattr(_fully_shard, POST_FORWARD))),
        ):
            stack.enter_context(patch.object(target, name, replacement))
        yield


def _address(tensor: Tensor) -> int:
    """Stand for the address of a tensor: equal for views of one place, and for nothing else."""
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.itemsize)


def _on_real_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return outside


class _Chunks:
    """`torch.chunk` that makes only the chunks looked at: FSDP2 needs one of each parameter's."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start, end = index * self._length, self._tensor.shape[self._dim]
        if start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, end - start))


def _cast(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
        if dtype is None:
            return original(self, *args, **kwargs)
        return _swap_tensors(self, lambda tensor: tensor.to(dtype))

    return to


def _empty(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def to_empty(self: nn.Module, *, device: torch.device, recurse: bool = True) -> nn.Module:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return original(self, device=device, recurse=recurse)
        return _swap_tensors(self, lambda tensor: torch.empty_like(tensor, device=device))

    return to_empty


def _swap_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Give a model other parameters and buffers: fake ones cannot change in place."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                changed = change(parameter.detach())
                module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = change(buffer)
    return model


def float32_layer_norm() -> Any:
    """Let LayerNorm compute in float32 under autocast, as on CUDA; on CPU it stays in half precision."""
    original = F.layer_norm

    def layer_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    return patch.object(F, "layer_norm", layer_norm)
