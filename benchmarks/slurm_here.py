"""A Slurm of four nodes on this machine, for a benchmark."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slurm import local_cluster  # noqa: E402


@contextmanager
def cluster() -> Iterator[tuple[Path, local_cluster.Cluster]]:
    """Start it; yield an empty folder and the cluster, whose commands the environment finds."""
    with tempfile.TemporaryDirectory(prefix="vitsweep-") as folder:
        Path(folder).chmod(0o755)
        slurm = local_cluster.Cluster(Path(folder) / "cluster")
        slurm.start(nodes=4)
        os.environ |= slurm.env
        try:
            yield Path(folder), slurm
        finally:
            slurm.stop()
