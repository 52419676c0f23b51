"""What schedulers, and those who start ranks, say in the environment of this process."""

import os
import socket
from pathlib import Path
from typing import Any

from vitsweep.console import captured
from vitsweep.errors import VitsweepError

NODE = "VITSWEEP_NODE"
"""Variable with this node's name, which an agent sets for its ranks."""
FIRST_PORT, NUM_PORTS = 20_000, 40_000


def node_name() -> str:
    """Return the name of this node: as an agent was told, as Slurm has it, or the host's."""
    given = (os.environ.get(name) for name in (NODE, "SLURMD_NODENAME"))
    return next(filter(None, given), "") or socket.gethostname()


def boot_id() -> str:
    """Return an id that differs between machines even where host names do not: the kernel's boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return socket.gethostname()


def scheduler_job() -> str:
    """Return what ends the job of a scheduler in which this process runs: `qdel 12.server`; "" without."""
    ends = {"PBS_JOBID": "qdel", "LSB_JOBID": "bkill", "SLURM_JOB_ID": "scancel"}
    found = (f"{ends[name]} {os.environ[name]}" for name in ends if os.environ.get(name))
    return next(found, "")


def hosts_in(nodes: str) -> list[str]:
    """Return the names in a list of Slurm such as `n[1-3]`."""
    try:
        done = captured(("scontrol", "show", "hostnames", nodes), timeout=20)
    except OSError:
        return [nodes]
    return done.stdout.split() if done.returncode == 0 else [nodes]


# Ranks that something else has started: torchrun, or srun.


def environment_rank() -> tuple[int, int, int] | None:
    """Return (rank, local rank, world size) of torchrun or srun, or None in a process without a launcher."""
    for rank, local_rank, size in (
        ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    ):
        if rank in os.environ and size in os.environ:
            return tuple(int(os.environ.get(key, 0)) for key in (rank, local_rank, size))  # type: ignore[return-value]
    return None


def ranks_per_node(size: int) -> int:
    """Return how many ranks torchrun or Slurm started on each node.

    Raises:
        VitsweepError: nodes hold different numbers of them.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))  # "2(x4)" or "2,1"
    if "," in tasks:
        raise VitsweepError(
            f"Slurm put {tasks} ranks on the nodes; a mesh needs the same number on each: start "
            "with `srun --ntasks-per-node=N`."
        )
    return int(tasks.split("(")[0])


def init_method() -> str:
    """Return where the ranks meet: torchrun's own address, or the first node of the Slurm step."""
    if "MASTER_ADDR" in os.environ:
        return "env://"
    first = hosts_in(os.environ["SLURM_STEP_NODELIST"])[0]
    step = int(os.environ["SLURM_JOB_ID"]) * 97 + int(os.environ.get("SLURM_STEP_ID", 0))
    return f"tcp://{first}:{FIRST_PORT + step % NUM_PORTS}"


def slurm_task() -> dict[str, Any]:
    """Return job, restart and node of this task of a Slurm job, as its `JobEnvironment` has them."""
    job = os.environ["SLURM_JOB_ID"]
    return {
        "job_id": job,
        "array_id": os.environ.get("SLURM_ARRAY_JOB_ID", job),
        "index": int(os.environ.get("SLURM_ARRAY_TASK_ID", 0)),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        "node_index": int(os.environ["SLURM_NODEID"]),
        "nodes": tuple(hosts_in(os.environ["SLURM_JOB_NODELIST"])),
        "launch_address": os.environ.get("SLURM_LAUNCH_NODE_IPADDR"),
    }


def slurm_job_id() -> str | None:
    """Return the id of the Slurm job in which this process runs, or None."""
    return os.environ.get("SLURM_JOB_ID")
