"""A real Slurm for the tests in this folder.

Ask for `cluster` to talk to four nodes with commands, or for `slurm_environ` when the code under
test runs in pytest's own process (submitit, a Hydra launcher) and must find the cluster itself.
The cluster is shared by all tests of a session: whoever kills a node starts it again.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm import local_cluster
from tests.launchers.slurm.fabricated import slurm, store

__all__ = ["slurm", "store"]


def eventually(done: Callable[[], bool], seconds: float, what: str, step: float = 0.2) -> None:
    """Wait for what Slurm does in its own time; `what` is the message when it does not."""
    assert local_cluster.until(done, seconds, step), f"not within {seconds} s: {what}"


class SlurmClient:
    """What a test does with a cluster: submit, look, wait, and break nodes."""

    def __init__(self, cluster: local_cluster.Cluster) -> None:
        self.cluster = cluster
        self.beside: list[local_cluster.Cluster] = []
        """Other objects for the same cluster that started daemons; `stop` reaps these."""
        self.names = cluster.settings.names

    @property
    def env(self) -> dict[str, str]:
        """The environment of clients: pytest's own as it is now, on this cluster."""
        return self.cluster.client_env

    def run(self, *command: str | Path, cwd: Path | None = None, timeout: float = 300) -> str:
        """Run a client; never without a time limit, because srun waits for ever on a dead node."""
        done = subprocess.run(
            command, env=self.env, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stderr}"
        return done.stdout.strip()

    def submit(self, command: str, *options: str, output: Path | str = "/dev/null") -> str:
        """Submit a shell command; %-patterns in `output` are Slurm's. Returns the job's id."""
        return self.run("sbatch", "--parsable", f"--output={output}", *options, f"--wrap={command}")

    def states(self, job: str) -> list[str]:
        """The state of a job, or of each element of an array, as the controller sees it now."""
        return self.run("squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", job).split()

    def wait(self, job: str, *states: str, seconds: float = 300) -> None:
        """Wait until the job, or each of its elements, is in one of these states."""
        wanted = set(states or ["COMPLETED"])
        try:
            eventually(lambda: set(self.states(job)) <= wanted, seconds, f"{job} in {wanted}")
        except AssertionError as error:
            job_now, nodes = self.run("scontrol", "show", "job", job), self.run("sinfo", "-N", "-l")
            raise AssertionError(f"{error}\n{job_now}\n{nodes}") from None

    def detail(self, job: str) -> dict[str, str]:
        """All that `scontrol show job` says, by its keys (`Restarts`, `NodeList`, ...)."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def accounting(self, job: str) -> list[str]:
        """The states in the accounting, every attempt included. It lags: use `eventually`."""
        return self.run("sacct", "-n", "-X", "-D", "-P", "-o", "State", "-j", job).splitlines()

    def kill_node(self, node: str) -> None:
        """As by loss of power; Slurm notices after about 30 s."""
        self.cluster.kill_node(node)

    def start_node(self, node: str) -> None:
        """Bring it back, and wait until Slurm has noticed."""
        self.cluster.start_node(node)

    def cancel_all(self) -> None:
        """Leave nothing behind for the next test."""
        self.run("scancel", f"--user={self.cluster.user}")


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """Skip with the command that gets the packages; a CI machine gets them by itself."""
    if not local_cluster.missing_packages():
        return
    if os.environ.get("CI") == "true" and os.getuid() == 0:
        local_cluster.install()
        return
    pytest.skip(f"needs Slurm: {local_cluster.apt_command()}")


@pytest.fixture
def state_folder() -> Iterator[Path]:
    """An empty folder with a short path that every user may enter, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="vitsweep-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "cluster"


@pytest.fixture(scope="session")
def cluster(slurm_packages: None) -> Iterator[SlurmClient]:
    """Four nodes with 4 CPUs and 8 fake GPUs each, with accounting, for the whole session."""
    with tempfile.TemporaryDirectory(prefix="vitsweep-") as folder:
        Path(folder).chmod(0o755)
        local = local_cluster.Cluster(Path(folder) / "cluster")
        local.start(nodes=4)
        client = SlurmClient(local)
        try:
            yield client
        finally:
            for each in (local, *client.beside):
                each.stop()


@pytest.fixture
def slurm_environ(cluster: SlurmClient, monkeypatch: pytest.MonkeyPatch) -> SlurmClient:
    """Put pytest's own process onto the cluster, for code that calls sbatch itself."""
    for name in os.environ.keys() - cluster.env.keys():
        monkeypatch.delenv(name)
    for name in ("PATH", *cluster.cluster.env):
        monkeypatch.setenv(name, cluster.env[name])
    return cluster
