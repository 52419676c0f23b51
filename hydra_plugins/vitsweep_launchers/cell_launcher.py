"""What every launcher of composed cells has.

All Hydra applications import it, so imports of vitsweep stand inside the methods.
"""

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
    """A launcher of Hydra that takes all cells of a command at once.

    vitsweep's sweeper calls `launch_cells`. No other sweeper can use it.

    Args:
        fields: everything in the launcher's YAML.
    """

    can_choose_rounds: ClassVar[bool] = False
    """Whether it may choose from the runs before: `sweep.minutes`, `sweep.limit`, `extras.ROUNDS`."""

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
