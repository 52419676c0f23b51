"""Joining the process group and device mesh of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.process_setup import limit_memory
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.mesh_shape import AXES
from vitsweep.spec.resources import Resources
from vitsweep.world import World


@contextmanager
def joined_process_group(
    cell: CellSpec, rank: int, local_rank: int, init_method: str
) -> Iterator[World]:
    """Join the process group (NCCL on CUDA, gloo on CPU) and its mesh, and leave both at the end.

    Args:
        cell: its ranks, threads, mesh and time limit are used.
        rank: global rank of this process.
        local_rank: rank on this node; it selects the GPU.
        init_method: rendezvous of the ranks (`file://...` or `tcp://host:port`).

    Raises:
        VitsweepError: the cell needs CUDA and this node has no usable GPU.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    resources = cell.resources
    device = _device(resources, local_rank)
    torch.set_num_threads(resources.threads_per_rank)
    dist.init_process_group(
        "nccl" if resources.device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=resources.world_size,
        timeout=timedelta(minutes=cell.measurement.timeout_min),
        device_id=device if resources.device == "cuda" else None,
    )
    mesh = init_device_mesh(resources.device, cell.mesh.degrees(), mesh_dim_names=AXES)
    limit_memory(resources)
    yield World(
        rank=rank,
        local_rank=local_rank,
        size=resources.world_size,
        device=device,
        shape=cell.mesh,
        mesh=mesh,
    )
    # gloo aborts now and then where one rank tears down while another still uses the connection
    dist.barrier()
    dist.destroy_process_group()


def _device(resources: Resources, local_rank: int) -> Any:
    import torch

    if resources.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise VitsweepError(
            "The cell was frozen for `resources.device=cuda`, but this node shows no usable GPU."
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
