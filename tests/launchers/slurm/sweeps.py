"""Sweeps on the test cluster, as a user types them."""

from dataclasses import dataclass
from pathlib import Path

from pandas import DataFrame

from tests.command import Command, fault
from tests.launchers.slurm.conftest import SlurmClient, eventually
from vitsweep.launchers.slurm.state.jobs import JobArray, JobEvents, job_arrays

SMALL = (
    "resources.threads_per_rank=1",
    "hydra/launcher=slurm_local_cluster",
)
"""Ranks of one thread: two jobs fit onto a node of the test cluster."""
HOLD = "+hydra.launcher.additional_parameters.hold=true"
"""Jobs wait until a test lets them go."""


@dataclass(frozen=True)
class Sweep:
    """One sweep in a folder of its own."""

    command: Command
    client: SlurmClient

    def submit(self, *arguments: str) -> list[JobArray]:
        """Submit and leave; return the arrays."""
        done = self.command("-m", *SMALL, *arguments, "hydra.launcher.wait=false")
        assert done.returncode == 0, done.stdout + done.stderr
        return self.arrays

    def run(self, *arguments: str, code: int = 0) -> DataFrame:
        """Submit and wait; return the table, indexed by sharding."""
        done = self.command("-m", *SMALL, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return self.command.cells()

    @property
    def arrays(self) -> list[JobArray]:
        return job_arrays(self.command.store)

    @property
    def events(self) -> JobEvents:
        """Events of the only job."""
        [array] = self.arrays
        [job] = array.jobs()
        return job.events()

    @property
    def job(self) -> str:
        """Id of the only job."""
        [array] = self.arrays
        return f"{array.slurm_id}_0"

    def until_running(self, seconds: float = 400) -> str:
        """Wait until a run has begun; return the cell."""
        eventually(
            lambda: self.arrays != [] and self.events.in_flight is not None, seconds, "a run"
        )
        return str((self.events.in_flight or {})["cell_id"])

    def until_ranks_run(self, seconds: float = 400) -> None:
        """Wait until the ranks of the faulty cell are at work."""
        logs = "results/*/cells/*/attempts/*/rank1.log"
        eventually(lambda: any(self.command.folder.glob(logs)), seconds, "ranks")

    def until_ended(self, seconds: float = 400) -> DataFrame:
        """Wait until no job is left; return the table that `collect` makes."""
        from vitsweep.launchers.slurm.state.poll import poll

        store = self.command.store
        is_over = lambda: not any(state.is_live for state in poll(store))  # noqa: E731
        eventually(is_over, seconds, "the end of all jobs", step=1.0)  # it asks three daemons
        done = self.command("collect", "--reconcile", quick=False)
        assert done.returncode == 0, done.stderr
        return self.command.cells()

    def log(self) -> str:
        return "\n".join(p.read_text() for p in Path(self.arrays[0].folder).glob("*_log.out"))


def hang(sharding: str = "fsdp") -> list[str]:
    """A cell that never ends by itself."""
    return [*fault("Hang"), f"sharding={sharding}", "sweep.baseline=null"]


@dataclass(frozen=True)
class Held:
    """A cell that runs until a test lets it go on.

    Attributes:
        folder: for the files by which they talk.
    """

    folder: Path

    @property
    def cell(self) -> list[str]:
        """Overrides of the cell."""
        target = "sequence_parallel._target_=tests.launchers.slurm.faults.HeldUntil"
        return [target, "+sequence_parallel.rank=1", f"+sequence_parallel.folder={self.folder}"]

    def is_waiting(self) -> bool:
        return (self.folder / "waiting").exists()

    def go_on(self) -> None:
        (self.folder / "go").touch()
