"""The faults that a cluster adds: nodes, the controller, requeues, cancelled jobs, dying submitters."""

import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from slurm import local_cluster
from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient
from tests.launchers.slurm.other_user import OtherUser
from tools.chaos import Chaos, left_after

PREEMPTED_WITHOUT_GRACE = "hydra.launcher.partition=scavenge"
"""The sweep runs where other jobs may preempt it; `SlurmChaos` sets the grace time to 0."""


class SlurmChaos(Chaos):
    """Faults that strike a sweep on the test cluster; it is restored at the end.

    Args:
        vitsweep: the command line, in a folder that every user may enter.
        asked: the command of the sweep, with `PREEMPTED_WITHOUT_GRACE`.
        num_cells: cells that it has.
        seed: of the faults.
        client: of the cluster, which nothing else uses meanwhile.
    """

    def __init__(
        self,
        vitsweep: Command,
        asked: tuple[str, ...],
        num_cells: int,
        seed: int,
        client: SlurmClient,
    ):
        super().__init__(vitsweep, asked, num_cells, seed)
        self.client = client
        self.other_user = OtherUser.found()
        self._repairs: dict[str, threading.Thread] = {}

    @property
    def faults(self) -> Mapping[str, Callable[[], bool]]:
        """Return the faults by name; each returns whether it found something to strike."""
        own = {
            "kill agent": lambda: self.send(signal.SIGKILL, "agent"),
            "kill coordinator": lambda: self.send(signal.SIGKILL, "coordinator"),
            "scancel": lambda: self._tell_slurm("scancel"),
            "requeue": lambda: self._tell_slurm("scontrol", "requeue"),
            "preempt without grace": self._preempt,
            "kill in submit window": self._kill_in_submit_window,
            "node death": self._kill_a_node,
            "controller death": self._kill_the_controller,
        }
        if self.other_user:
            own["status of another user"] = self._read_as_another_user
        return {**super().faults, **own}

    def run(self, seconds: float, pause: tuple[float, float] = (2.0, 5.0)) -> None:
        """Do the same with a first command that dies before it notes the ids of its jobs."""
        self._let_the_next_command_die("dies_after")
        super().run(seconds, pause)

    def calm(self) -> None:
        """Repair the cluster."""
        super().calm()
        self.next_environment = {}
        for repair in list(self._repairs.values()):
            repair.join()
        persistently(self.client.cluster.start)
        self.client.run("scontrol", "update", "partition=scavenge", "gracetime=10")

    def losses(self) -> list[str]:
        """Return what was lost, doubled, changed or left behind, jobs included."""
        found = super().losses()
        jobs = partial(self._jobs, "PENDING,RUNNING,COMPLETING", "%F_%K:%T:%r")
        if left := left_after(60, jobs):  # Slurm takes a while to end one whose node has died
            found.append(f"jobs left: {left}")
        if self.other_user and (files := self.other_user.files_in(self.vitsweep.store.root)):
            found.append(f"files that a look of another user left: {files}")
        return found

    def close(self) -> None:
        """Let nothing survive, whatever happened."""
        super().close()
        self.client.cancel_all()

    def _jobs(self, states: str, shown: str = "%F_%K") -> list[str]:
        with suppress(AssertionError, subprocess.TimeoutExpired):  # there may be no controller
            name = f"--name=vitsweep-{self.vitsweep.store.name}"
            return self.client.run("squeue", "-h", "-r", name, "-t", states, "-o", shown).split()
        return []

    def _tell_slurm(self, *command: str) -> bool:
        """Give an order about one job of the sweep; a pending one can only be cancelled."""
        jobs = self._jobs("RUNNING,PENDING" if command == ("scancel",) else "RUNNING")
        with suppress(AssertionError, subprocess.TimeoutExpired):
            if jobs:
                self.client.run(*command, self.dice.choice(sorted(jobs)))
        return bool(jobs)

    def _preempt(self) -> bool:
        """Take two nodes for a job of a higher partition; Slurm requeues what runs there at once."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.client.run("scontrol", "update", "partition=scavenge", "gracetime=0")
            self.client.submit("sleep 2", "--partition=high", "--nodes=2", "--exclusive")
            return True
        return False

    def _kill_in_submit_window(self) -> bool:
        """Type the command once more; it dies if there is anything to submit."""
        self._let_the_next_command_die(self.dice.choice(["dies_before", "dies_after"]))
        self.start()
        return True

    def _let_the_next_command_die(self, when: str) -> None:
        """Let it die right before or right after it calls `sbatch`; see `write_dying_sbatch`."""
        folder = self.vitsweep.folder / when
        write_dying_sbatch(folder)
        self.next_environment = {"PATH": f"{folder}:{os.environ['PATH']}"}

    def _read_as_another_user(self) -> bool:
        assert self.other_user is not None
        if self.vitsweep.store.root.exists():
            done = self.other_user.vitsweep("status", str(self.vitsweep.store.root))
            self.check_reader("status of another user", done)
        return self.vitsweep.store.root.exists()

    def _kill_a_node(self) -> bool:
        node = self.dice.choice(sorted(self.client.names))
        if not self._is_whole(node):
            return False
        with suppress(local_cluster.ClusterError):  # a step was just starting there
            self.client.kill_node(node)
        self._repair_later(node)
        return True

    def _kill_the_controller(self) -> bool:
        pid = self.client.cluster.alive("slurmctld")
        if not pid or not self._is_whole("slurmctld"):
            return False
        os.kill(pid, self.dice.choice([signal.SIGKILL, signal.SIGTERM]))
        self._repair_later("slurmctld")
        return True

    def _is_whole(self, name: str) -> bool:
        return name not in self._repairs or not self._repairs[name].is_alive()

    def _repair_later(self, name: str) -> None:
        """Bring it back after some seconds, in a thread: Slurm takes its time to notice.

        Whatever else is down comes back too: a node does not serve without the controller.
        """
        cluster = local_cluster.Cluster(self.client.cluster.folder.root)
        self.client.beside.append(cluster)
        thread = threading.Timer(self.dice.uniform(2, 20), persistently, [cluster.start])
        self._repairs[name] = thread
        thread.start()


def persistently(repair: Callable[[], object], tries: int = 5) -> None:
    """Try again where the cluster does not come up: another part of it may be down."""
    for left in reversed(range(tries)):
        try:
            repair()
            return
        except (local_cluster.ClusterError, subprocess.SubprocessError):
            if not left:
                raise


def write_dying_sbatch(folder: Path) -> None:
    """Write an `sbatch` that kills the command that calls it.

    Args:
        folder: for it; the name says whether the command dies before the job is submitted or after,
            when it has not read the job's id yet.
    """
    folder.mkdir(exist_ok=True)
    submit = "" if folder.name == "dies_before" else f'{shlex.quote(real_sbatch())} "$@"; '
    script = folder / "sbatch"
    script.write_text(f"#!/bin/sh\n{submit}kill -9 $PPID\n")
    script.chmod(0o755)


def real_sbatch() -> str:
    """Return the path of Slurm's own."""
    found = shutil.which("sbatch")
    assert found
    return found
