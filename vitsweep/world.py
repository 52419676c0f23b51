"""Rank, device and device mesh of this process, however it was started."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitsweep.spec.resources import AXES, TOKEN_AXES, MeshShape

ALONE = "alone"
"""Name of the mesh axis of size 1."""

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place.

    Attributes:
        rank: global rank.
        local_rank: rank on this node.
        size: number of ranks.
        device: this rank's device.
        shape: degrees of the mesh.
        mesh: what `device_mesh` returns, or None in one process without a process group.
    """

    rank: int
    local_rank: int
    size: int
    device: "torch.device"
    shape: MeshShape
    mesh: "DeviceMesh | None"

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different images."""
        return self.shape.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the images this rank sees."""
        at = dict(zip(AXES, self.coordinates(), strict=True))
        return at["replicate"] * self.shape.shard + at["shard"]

    def coordinates(self) -> tuple[int, ...]:
        """This rank's index along each of `AXES` (the last axis runs fastest)."""
        return self.shape.coordinates(self.rank)

    def axis(self, name: str) -> "DeviceMesh":
        """Return the sub-mesh of one axis."""
        assert self.mesh is not None, "a mesh needs a process group"
        return self.mesh[name if getattr(self.shape, name) > 1 else ALONE]

    def joint_axis(self, name: str, *names: str) -> "DeviceMesh":
        """Return adjacent axes as one; it is called `name` where more than one has ranks."""
        assert self.mesh is not None, "a mesh needs a process group"
        held = tuple(axis for axis in names if getattr(self.shape, axis) > 1)
        return self.mesh[held]._flatten(name) if len(held) > 1 else self.axis((*held, names[0])[0])

    def gradient_group(self) -> "ProcessGroup | None":
        """Group of the ranks whose gradients are averaged; None stands for all ranks.

        They see different images or different tokens of one image; ranks of one pipeline or tensor
        group hold different weights.
        """
        if self.mesh is None or self.shape.gradient_shares == self.size:
            return None
        return self.joint_axis("gradient", "replicate", "shard", *TOKEN_AXES).get_group()

    def token_group(self) -> "ProcessGroup":
        """Group of the ranks that share the tokens of one image."""
        return self.joint_axis("token", *TOKEN_AXES).get_group()

    def state_mesh(self, *, replicated: bool) -> "DeviceMesh":
        """Mesh over which parameters, gradients and optimizer state are spread (USP, tip 3).

        Ranks that share tokens hold shards of their own. With `replicated` there is an axis of
        copies in front.
        """
        shards = self.joint_axis("state", "shard", *TOKEN_AXES)
        if not replicated:
            return shards
        assert self.mesh is not None
        assert shards.mesh_dim_names is not None
        return self.mesh["replicate", shards.mesh_dim_names[0]]


def device_mesh(device_type: str, shape: MeshShape) -> "DeviceMesh":
    """Return the mesh of the axes above 1, and of an axis of this rank alone for all others.

    Every axis is a process group, which takes NCCL time and memory on the GPU. Every rank calls it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    held = [axis for axis in AXES if getattr(shape, axis) > 1]
    degrees = [getattr(shape, axis) for axis in held]
    return init_device_mesh(device_type, (*degrees, 1), mesh_dim_names=(*held, ALONE))


def allow_tf32(allowed: bool) -> None:
    """Switch TensorFloat-32 in cuBLAS and in cuDNN's convolutions and RNNs, for the whole process.

    torch has older and newer flags, and reading one kind raises where only the other was set. These two
    setters change both kinds together, so that TorchInductor and other libraries may read either.
    """
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def process_flags_kept() -> Iterator[None]:
    """Context after which torch's flags of the process that a cell may set are as they were before."""
    import torch

    backends: Any = torch.backends
    tf32 = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    flags = [(owner, "fp32_precision", owner.fp32_precision) for owner in tf32]
    flags.append((backends.cudnn, "benchmark", backends.cudnn.benchmark))
    if dynamo := sys.modules.get("torch._dynamo.config"):  # takes seconds to import
        flags.append((dynamo, "optimize_ddp", dynamo.optimize_ddp))
    matmul = allowed = None
    with suppress(RuntimeError):  # raised where only the newer flags were set
        matmul = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        allowed = backends.cudnn.allow_tf32
    try:
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if allowed is not None:
            backends.cudnn.allow_tf32 = allowed
        for owner, name, value in flags:
            setattr(owner, name, value)
