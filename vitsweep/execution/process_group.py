"""Joining the process group and device mesh of a run."""

import gc
import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from vitsweep.errors import VitsweepError
from vitsweep.execution.process_setup import limit_memory
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Resources
from vitsweep.world import World, device_mesh


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
        VitsweepError: the cell needs CUDA, and this rank sees no GPU of its own.
    """
    import torch
    import torch.distributed as dist

    if cell.runtime.collects_garbage != "automatic":
        gc.freeze()  # a collection looks at 400,000 objects of imports otherwise: 0.2 s, twice a run
    resources = cell.resources
    device = _device(resources, local_rank)
    torch.set_num_threads(resources.threads_per_rank)
    timeout = timedelta(minutes=cell.measurement.timeout_min)
    store = _store(init_method, rank, resources.world_size, timeout)
    dist.init_process_group(
        "nccl" if resources.device == "cuda" else "gloo",
        init_method=init_method if store is None else None,
        store=store,
        rank=rank,
        world_size=resources.world_size,
        timeout=timeout,
        device_id=device if resources.device == "cuda" else None,
    )
    mesh = device_mesh(resources.device, cell.mesh)
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


def _store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return the store of a `tcp://` rendezvous, or None for another one.

    Torch's own `tcp://` would listen on all interfaces of the first node; this one listens on the
    address through which the nodes reach it, unless that is a name for this machine alone.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    url = urlsplit(init_method)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        return None
    listening = None if rank else _listening(url.hostname, url.port)
    return TCPStore(
        url.hostname,
        url.port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _listening(host: str, port: int) -> socket.socket | None:
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if host != address and ipaddress.ip_address(address).is_loopback:
        return None
    return socket.create_server((str(address), port), family=family, backlog=2048)


def _device(resources: Resources, local_rank: int) -> Any:
    """Return the device of a rank: the one its cell was frozen for, never another.

    A rank that sees one GPU takes it: srun may give each rank a GPU of its own.
    """
    import torch

    if resources.device == "cpu":
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not visible or 1 < visible <= local_rank:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        raise VitsweepError(
            f"The cell was frozen for `resources.device=cuda` with `resources.ranks_per_node="
            f"{resources.ranks_per_node}`, and rank {local_rank} of this node sees {visible} GPUs "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}, torch "
            f"{torch.__version__} built for {built_for}): request the GPUs from the scheduler and "
            "install a CUDA build of torch, or use `resources.device=cpu`."
        )
    device = torch.device("cuda", local_rank if visible > 1 else 0)
    torch.cuda.set_device(device)
    return device
