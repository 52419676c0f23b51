"""The place of a process in its Slurm job."""

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PORTS = range(20_000, 32_000)
"""Below the range from which Linux takes ports for outgoing connections."""
NUM_CANDIDATE_PORTS = 8
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Job, restart and node of this process, as Slurm sets them.

    Attributes:
        job_id: id of this job; every job of an array has its own.
        array_id: id of the array.
        index: of the job in the array.
        restart: how often Slurm has started the job before.
        node_index: of this node in the job; 0 runs the coordinator.
        nodes: names of all nodes, by node index.
        launch_address: IP address of the node that started the step, which is the first one.
    """

    job_id: str
    array_id: str
    index: int
    restart: int
    node_index: int
    nodes: tuple[str, ...]
    launch_address: str | None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "JobEnvironment":
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
    def node_name(self) -> str:
        """This node's name."""
        return self.nodes[self.node_index]

    @property
    def shown_id(self) -> str:
        """The job's id as Slurm's tools show it, such as `123_4`."""
        return f"{self.array_id}_{self.index}"

    @property
    def addresses(self) -> list[str]:
        """Addresses to try for the first node, best first; its name need not resolve.

        A job of one node does not leave the node.
        """
        known = [self.nodes[0], self.launch_address] if len(self.nodes) > 1 else [LOOPBACK]
        return list(dict.fromkeys(filter(None, known)))

    @staticmethod
    def ports(key: bytes) -> list[int]:
        """Return the ports on which the first node may listen: several, because any may be taken.

        Args:
            key: the secret of the job; nobody else can compute the ports.
        """
        return random.Random(hashlib.sha256(b"ports" + key).digest()).sample(
            PORTS, NUM_CANDIDATE_PORTS
        )

    def key(self, folder: Path) -> bytes:
        """Return the secret with which agents of this start of this job authenticate.

        Args:
            folder: of the job array.
        """
        secret = (folder / "key").read_text(encoding="utf-8")
        return f"{secret}.{self.job_id}.{self.restart}".encode()
