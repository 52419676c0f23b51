"""Hydra's grammar, vitsweep's expansion."""

import sys
from typing import Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hydra_plugins.vitsweep_launchers.plugin import refuse_foreign


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
