"""One rank of a large world in one process: fake tensors and a process group that sends nothing.

Needs torch. Replaced while it lasts is only what fake tensors cannot stand for (`SHIMS`); all else is what a
run executes.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
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

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.sharding.fsdp_units import Units
from vitsweep.world import World, device_mesh

# What DistributedDataParallel does to gradients, on fake tensors (needs torch).
#
# DDP's reducer, in C++, reads the memory of tensors, which fake ones do not have.


FIRST_BUCKET_BYTES = 2**20
"""DDP's first bucket is smaller, so that the exchange starts early (torch.distributed)."""


class _Reducer:
    """What torch's pipelines and `sharding=ddp` call of a DDP module's reducer."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Do nothing: the hooks are there already."""

    def _reset_state(self) -> None:
        """Do nothing: no pass has begun."""


class Replica(nn.Module):
    """Gradients copied to buckets, which are reduced as soon as they are full.

    Args:
        module: whose gradients are averaged.
        process_group: over which; None for all ranks.
        bucket_cap_mb: size of a bucket in MiB.
        gradient_as_bucket_view: gradients become views of the buckets.
        _: what else DDP takes.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.module, self._group, self._sync = module, process_group, True
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._exchange_dtype: torch.dtype | None = None
        self.reducer = _Reducer()
        # Built anew after the first step, in the order in which gradients come: the last ones first.
        parameters: list[Any] = [p for p in module.parameters() if p.requires_grad][::-1]
        limits = [FIRST_BUCKET_BYTES, int(bucket_cap_mb * 2**20)]
        indices, _limits = dist._compute_bucket_assignment_by_size(parameters, limits)  # type: ignore[attr-defined]
        self.buckets: list[Tensor] = []
        for bucket in indices:
            self._fill([parameters[index] for index in bucket])

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Make one bucket, reduced when all its gradients have come."""
        total = sum(p.numel() for p in parameters)
        bucket = torch.empty(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self.buckets.append(bucket)
        waiting: set[Tensor] = set(parameters)
        start = 0
        for parameter in parameters:
            view = bucket[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            parameter.register_post_accumulate_grad_hook(
                lambda p, view=view: self._take(p, view, waiting, parameters, bucket)
            )

    def _take(
        self,
        parameter: Tensor,
        view: Tensor,
        waiting: set[Tensor],
        parameters: list[nn.Parameter],
        bucket: Tensor,
    ) -> None:
        if not self._sync:
            return
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        if self.gradient_as_bucket_view:
            parameter.grad = view
        waiting.discard(parameter)
        if waiting:
            return
        waiting.update(parameters)
        sent = bucket.to(self._exchange_dtype or bucket.dtype)
        sent.div_(dist.get_world_size(self._group))
        dist.all_reduce(sent, group=self._group)
        if sent is not bucket:
            bucket.copy_(sent)
        if not self.gradient_as_bucket_view:
            start = 0
            for each in parameters:
                assert each.grad is not None
                each.grad.copy_(bucket[start : start + each.numel()].view(each.shape))
                start += each.numel()

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Exchange gradients in the dtype that is the state, as `sharding.gradient_dtype` asks for."""
        self._exchange_dtype = state

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, after sending its buffers (BatchNorm's statistics) from the first rank."""
        buffers = list(self.module.buffers())
        if self._sync and self.training and buffers:
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
                some = torch.cat([b.flatten() for b in buffers if b.dtype == dtype])
                dist.broadcast(
                    some, dist.get_process_group_ranks(self._group)[0], group=self._group
                )
        return self.module(*inputs, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange no gradients inside."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True


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
        for shim in SHIMS:
            stack.enter_context(patch.object(shim.owner, shim.name, shim.replacement))
        yield


def _address(tensor: Tensor) -> int:
    """Stand for the address of a tensor: equal for views of one address, and for nothing else."""
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


def _apply(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Give a model other parameters and buffers: fake ones cannot change in place."""

    def apply(
        self: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return original(self, change, recurse)
        swapped: dict[nn.Parameter, nn.Parameter] = {}  # a tied one stays tied
        for module in self.modules() if recurse else (self,):
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in swapped:
                    changed = change(parameter.detach())
                    swapped[parameter] = nn.Parameter(changed, parameter.requires_grad)
                module._parameters[name] = swapped[parameter]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = change(buffer)
        return self

    return apply


class Shim(NamedTuple):
    """An attribute of torch that is replaced while a world is fake.

    Attributes:
        owner: module or class that has it.
        name: of the attribute.
        replacement: what stands there meanwhile.
        reason: why fake tensors cannot do with the original.
    """

    owner: Any
    name: str
    replacement: Any
    reason: str


def _outside(owner: Any, name: str, reason: str) -> Shim:
    return Shim(owner, name, _on_real_tensors(getattr(owner, name)), reason)


SHIMS = (
    Shim(torch.nn.parallel, "DistributedDataParallel", Replica,
         "its reducer, in C++, reads the memory of gradients"),
    Shim(pipelining.stage, "DistributedDataParallel", Replica,
         "a stage knows by this class that gradients wait for the last micro-batch"),
    Shim(FakeTensor, "data_ptr", _address,
         "a fake tensor has no address; views of one buffer are distinguished by it"),
    Shim(nn.Module, "_apply", _apply(nn.Module._apply),
         "fake parameters cannot change their dtype in place, nor those on the meta device become fake"),
    Shim(_fsdp_param, "_chunk_with_empty", _Chunks,
         "FSDP2 makes a chunk for every rank and keeps one: seconds per parameter in a large world"),
    _outside(DeviceMesh, "_flatten", "a mesh looks up its ranks in tensors, which must be real"),
    _outside(DeviceMesh, "__getitem__", "the same, for a mesh of some axes"),
    _outside(_fully_shard, "_get_post_forward_mesh_info",
             "the same, for the mesh of `reshard_after_forward=<number>`"),
    Shim(Units, "_agree", lambda units, reached: None,
         "what ranks answer each other is read, and there is one rank"),
)  # fmt: skip
"""All that is replaced, known of torch 2.11 to 2.13. What begins with `_` is private to torch: another
version may lack it; `tests/extras/predict/test_fake_world.py` names what is missing or behaves otherwise."""


def float32_layer_norm() -> Any:
    """Let LayerNorm compute in float32 under autocast, as on CUDA; on CPU it stays in half precision."""
    original = F.layer_norm

    def layer_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return original(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    return patch.object(F, "layer_norm", layer_norm)
