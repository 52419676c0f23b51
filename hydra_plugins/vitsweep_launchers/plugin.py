"""The Hydra side of vitsweep: its sweeper and its launchers.

All Hydra applications import it, so imports of vitsweep stand inside the methods.
"""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest, LaunchResult
    from vitsweep.launchers.slurm.submit.settings import SlurmSettings
    from vitsweep.planning.sweep_plan import SweepPlan
    from vitsweep.spec.resources import Machine


class CellLauncherPlugin(Launcher):
    """A launcher of Hydra that takes all cells of a command at once.

    vitsweep's sweeper calls `launch_cells`. No other sweeper can use it.

    Args:
        fields: everything in the launcher's YAML.
    """

    can_choose_rounds: ClassVar[bool] = False
    """Whether it may choose from the runs before: screening, `sweep.minutes`, `sweep.limit`, a race."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    @abstractmethod
    def machine(self) -> "Machine":
        """Return the node that cells are planned for; every `auto` value is resolved with it.

        Raises:
            VitsweepError: the node is unknown.
        """

    @abstractmethod
    def launch_cells(self, request: "LaunchRequest") -> "AbstractContextManager[LaunchResult]":
        """Measure what is missing of the cells.

        The result is summarized within the `with` block. A launcher that measures on this machine
        keeps the sweep locked until the block ends: drawing charts would disturb the timing of the
        next command that waits for the lock. One whose cells run elsewhere need not hold it.

        Raises:
            VitsweepError: something the user asked for cannot be done.
        """

    def with_paired_baselines(self, plan: "SweepPlan") -> "SweepPlan":
        """Return the plan without the baselines that cannot run in the blocks of their cells."""
        return plan

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what composing cells needs."""
        self.config = config
        self.loader = hydra_context.config_loader

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Refuse the jobs of another Hydra application, or of another sweeper, with a sentence.

        Raises:
            SystemExit: always, with 2.
        """
        refuse_foreign("hydra/launcher")


class LocalLauncher(CellLauncherPlugin):
    """Runs every cell here, in fresh processes of its own (`vitsweep.launchers.local`)."""

    can_choose_rounds = True

    def machine(self) -> "Machine":
        """Return this machine.

        Raises:
            BadValueError: a setting is given, and this launcher has none.
        """
        from vitsweep.errors import BadValueError
        from vitsweep.spec.resources import Machine

        for name in self.fields:
            raise BadValueError(
                f"`hydra.launcher.{name}`: the launcher of this machine has no settings."
            )
        return Machine.here()

    def launch_cells(self, request: "LaunchRequest") -> "AbstractContextManager[LaunchResult]":
        """Measure what is missing, one block after the other."""
        from vitsweep.launchers.local import launch

        return launch(request)


class SlurmLauncher(CellLauncherPlugin):
    """Submits cells as job arrays through submitit (`vitsweep.launchers.slurm.submit.launch`).

    Args:
        fields: everything in conf/hydra/launcher/slurm.yaml.
    """

    def machine(self) -> "Machine":
        """Return one node of the partition."""
        from vitsweep.launchers.slurm.commands import machine_of

        return machine_of(self.settings())

    def launch_cells(self, request: "LaunchRequest") -> "AbstractContextManager[LaunchResult]":
        """Submit what is missing; wait for it unless `wait` is false."""
        from vitsweep.launchers.slurm.submit.launch import launch

        return launch(request, self.settings())

    def with_paired_baselines(self, plan: "SweepPlan") -> "SweepPlan":
        """Leave out baselines that request other resources, or run in jobs of their own."""
        from vitsweep.launchers.slurm.submit.sbatch import paired

        return paired(plan, self.settings())

    def settings(self) -> "SlurmSettings":
        """Return the fields, typed and checked."""
        from vitsweep.launchers.slurm.submit.settings import settings_of

        plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(self.fields), resolve=True)
        return settings_of(plain)


class AllocationLauncher(CellLauncherPlugin):
    """Runs cells on the nodes of an allocation, from the first of them.

    Args:
        fields: everything in conf/hydra/launcher/allocation.yaml.
    """

    can_choose_rounds = True

    @cached_property
    def _allocation(self) -> Any:
        from vitsweep import extras

        plain = OmegaConf.to_container(OmegaConf.create(self.fields), resolve=True)
        return extras.option("hydra/launcher=allocation")(plain)

    def machine(self) -> "Machine":
        """Return this node, of which there are so many."""
        machine: Machine = self._allocation.machine()
        return machine

    def launch_cells(self, request: "LaunchRequest") -> "AbstractContextManager[LaunchResult]":
        """Measure what is missing, one block after the other."""
        launched: AbstractContextManager[LaunchResult] = self._allocation.launch(request)
        return launched


class VitsweepSweeper(Sweeper):
    """Composes each distinct choice once and hands all cells to the launcher."""

    def __init__(self) -> None:
        self.launcher: Launcher | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what a sweep needs, and make its launcher."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.hydra_context = hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep; an error the user can fix ends the program with a sentence and exit code 2."""
        if "sweep" not in self.config or "measurement" not in self.config:
            refuse_foreign("hydra/sweeper")
        from vitsweep.cli.hydra_detour import sweep_in_hydra
        from vitsweep.errors import ExitCode, VitsweepError

        assert self.launcher is not None, "Hydra calls setup() first"
        loader = self.hydra_context.config_loader
        try:
            return sweep_in_hydra(arguments, self.config, loader, self.launcher)
        except VitsweepError as error:
            print(error, file=sys.stderr)
            raise SystemExit(ExitCode.bad_input) from error


def refuse_foreign(group: str) -> NoReturn:
    """End an application that is not vitsweep with a sentence.

    Raises:
        SystemExit: always, with 2.
    """
    print(
        f"`{group}` of vitsweep measures the cells of `python -m vitsweep` alone: choose one of Hydra's "
        "own here.",
        file=sys.stderr,
    )
    raise SystemExit(2)
