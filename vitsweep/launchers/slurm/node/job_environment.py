"""Where in a Slurm job a process runs."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PORTS = range(20_000, 32_000)
"""Below the range from which Linux takes ports for outgoing connections."""
TRIED_PORTS = 8


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Where in a job this process runs, as Slurm says.

    Attributes:
        job_id: id of this job; elements of an array have their own.
        array_id: id of the array.
        index: place in the array.
        restart: how often Slurm has started the job before.
        node_index: 0 for the node that leads.
        nodes: names, the leading one first.
        launch_address: address of the node that started the step, which is the first one.
    """

    job_id: str
    array_id: str
    index: int
    restart: int
    node_index: int
    nodes: tuple[str, ...]
    launch_address: str | None

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> "JobEnvironment":
        """Read it from the environment of a Slurm task."""
        from submitit.slurm.slurm import SlurmJobEnvironment

        job = environ["SLURM_JOB_ID"]
        return cls(
            job_id=job,
            array_id=environ.get("SLURM_ARRAY_JOB_ID", job),
            index=int(environ.get("SLURM_ARRAY_TASK_ID", 0)),
            restart=int(environ.get("SLURM_RESTART_COUNT", 0)),
            node_index=int(environ["SLURM_NODEID"]),
            nodes=tuple(SlurmJobEnvironment().hostnames),
            launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR"),
        )

    @property
    def name(self) -> str:
        """This node's name."""
        return self.nodes[self.node_index]

    @property
    def shown(self) -> str:
        """The job's id as Slurm's tools show it."""
        return f"{self.array_id}_{self.index}"

    @property
    def addresses(self) -> list[str]:
        """Where the first node may be reached, best first; its name need not resolve."""
        known = [self.nodes[0], self.launch_address]
        return list(dict.fromkeys(filter(None, known)))

    @property
    def ports(self) -> list[int]:
        """Ports the first node may listen on: several, because any one may be taken."""
        return random.Random(f"{self.job_id}.{self.restart}").sample(PORTS, TRIED_PORTS)

    def key(self, folder: Path) -> bytes:
        """Secret that only agents of this start of this job know."""
        secret = (folder / "key").read_text()
        return f"{secret}.{self.job_id}.{self.restart}".encode()
