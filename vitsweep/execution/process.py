"""Joining the process group and device mesh of a run."""

import ctypes
import gc
import ipaddress
import itertools
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from vitsweep.errors import VitsweepError
from vitsweep.files import open_safely
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Resources
from vitsweep.world import World, device_mesh

# Set-up of a process that this one starts: its main module, log, memory limit and end with the launcher.


MIB, GIB = 2**20, 2**30
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Parameters of mallopt(3)."""


def log_to(path: Path) -> None:
    """Send everything this process prints, C++ libraries included, to a file of its own."""
    descriptor = open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)


@contextmanager
def main_module_left_alone() -> Iterator[None]:
    """Keep processes that start inside the block from running the user's script once more.

    multiprocessing lets each child import the main module of its parent, so that a script would need
    `if __name__ == "__main__":` around all that it does. Ranks and processes that trace need nothing of it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_launcher() -> None:
    """Kill this process when its launcher dies; leave Ctrl-C to the launcher.

    The parent of a forked rank is the fork server, which lives as long as any rank does, so the
    launcher itself is watched.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        threading.Thread(target=_kill_after, args=(launcher,), daemon=True).start()


def _kill_after(launcher: Any) -> None:
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def exit_now(code: int) -> None:
    """Exit without running exit handlers, which would wait for threads that no longer matter."""
    with suppress(OSError):  # the log may be on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def limit_memory(resources: Resources) -> None:
    """Let allocations on a CPU fail beyond `resources.memory_gib_per_rank` of what is in use now."""
    if resources.memory_gib_per_rank is None or resources.device != "cpu":
        return
    _return_freed_memory()
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5])
    in_use = pages * resource.getpagesize()
    limit = in_use + int(resources.memory_gib_per_rank * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _return_freed_memory() -> None:
    """Let glibc return large freed blocks to the system, whichever thread allocated them.

    Otherwise fragmentation uses up the limit: gloo's threads would each keep an arena of their own,
    and a freed gradient bucket would stay mapped between live tensors.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, MIB)


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

    if cell.runtime.collects_garbage == "automatic":
        gc.unfreeze()  # in a script, a collection looks at all that was imported
    else:
        gc.freeze()
    resources = cell.resources
    device = own_device(resources, local_rank)
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
    world = own_world(cell, rank, local_rank)
    limit_memory(resources)
    yield world
    # gloo aborts now and then where one rank tears down while another still uses the connection
    dist.barrier()
    dist.destroy_process_group()


_GROUPS = itertools.count()
"""Numbers the process groups that this process has joined."""


def _store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return the store of a `tcp://` or `env://` rendezvous, or None for another one.

    That of torchrun outlives a process group. Each group has its own part of it, since the addresses that an
    earlier one left there lead nowhere.

    Torch's own `tcp://` would listen on all interfaces of the first node; this one listens on the
    address through which the nodes reach it, unless that is a name for this machine alone.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    url = urlsplit(init_method)
    if url.scheme == "env":
        shared, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
        return PrefixStore(f"vitsweep/{next(_GROUPS)}", shared)
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


def own_world(cell: CellSpec, rank: int, local_rank: int) -> World:
    """Return this rank's position for a cell in the process group that exists; every rank calls it."""
    return World(
        rank=rank,
        local_rank=local_rank,
        size=cell.resources.world_size,
        device=own_device(cell.resources, local_rank),
        shape=cell.mesh,
        mesh=device_mesh(cell.resources.device, cell.mesh),
    )


def own_device(resources: Resources, local_rank: int) -> Any:
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
