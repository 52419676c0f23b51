"""The Hydra side of vitsweep: its sweeper and its launchers.

All Hydra applications import it, so imports of vitsweep stand inside the methods.
"""

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.vitsweep_launchers.cell_launcher import CellLauncherPlugin, refuse_foreign

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest, LaunchResult
    from vitsweep.launchers.slurm.submit.settings import SlurmSettings
    from vitsweep.planning.sweep_plan import SweepPlan
    from vitsweep.spec.resources import Machine


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
