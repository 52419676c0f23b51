"""The Hydra side of every launcher that takes composed cells."""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest, LaunchResult
    from vitsweep.planning.sweep_plan import SweepPlan
    from vitsweep.spec.resources import Machine


class CellLauncherPlugin(Launcher):
    """A launcher of Hydra that implements `vitsweep.launchers.base.CellLauncher`.

    vitsweep's sweeper calls `launch_cells`. No other sweeper can use it.

    Args:
        fields: everything in the launcher's YAML.
    """

    can_choose_rounds: ClassVar[bool] = False
    """Whether `launch_cells` runs what `extras.ROUNDS` adds: rounds, each chosen from the runs before."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    @abstractmethod
    def machine(self) -> "Machine":
        """Return the node that cells are planned for."""

    @abstractmethod
    def launch_cells(self, request: "LaunchRequest") -> "AbstractContextManager[LaunchResult]":
        """Measure what is missing of the cells."""

    def with_paired_baselines(self, plan: "SweepPlan") -> "SweepPlan":
        """Return the plan without the baselines that cannot run in the blocks of their cells."""
        return plan

    def check_that_results_are_awaited(self) -> None:
        """Raise a VitsweepError where the launcher returns before its cells have run."""

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
