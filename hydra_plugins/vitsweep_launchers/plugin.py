"""The Hydra side of every launcher that takes composed cells."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest, LaunchResult
    from vitsweep.planning.sweep_plan import SweepPlan
    from vitsweep.spec.resources import Machine


class CellLauncherPlugin(Launcher):
    """A launcher of Hydra that implements `vitsweep.launchers.base.CellLauncher`.

    vitsweep's sweeper calls `launch_cells`. A sweeper of Hydra's own (basic, optuna) calls `launch`,
    which composes the cells and returns the objective of each.

    Args:
        fields: everything in the launcher's YAML.
    """

    can_race: ClassVar[bool] = False
    """Whether `launch_cells` runs `sweep.search=race`: rounds, each chosen from the runs before."""

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
        """Run the cells of one of Hydra's own sweepers; each returns its objective.

        A cell that was not measured returns None, which optuna's sweeper counts as a failed trial
        (NaN would end the sweep of the others). Equal trials of a batch are one cell, and each gets its row.
        """
        from vitsweep.cli.cells import run_cells
        from vitsweep.cli.hydra_detour import composer_of, session_of
        from vitsweep.composition.grid import named
        from vitsweep.errors import BadValueError

        self.check_that_results_are_awaited()
        composer = composer_of(self.config, self.loader)
        typed = set(self.config.hydra.overrides.task)  # what a sweeper of Hydra adds varies
        swept = {o.partition("=")[0] for texts in job_overrides for o in texts if o not in typed}
        cells = [composer.compose(list(overrides)) for overrides in job_overrides]
        if cells[0].tree["sweep"]["search"] == "race":
            raise BadValueError(
                "`sweep.search=race` chooses cells by itself, and so does the sweeper that is chosen "
                "(`hydra/sweeper`): leave out one of them."
            )
        cells = named(cells, composer, swept)
        different = {cell.key: cell for cell in cells}
        rows = run_cells(session_of(self, list(different.values()), self.config, composer))
        row_of = dict(zip(different, rows, strict=True))
        return [self._job_return(cell.overrides, cell.tree, row_of[cell.key]) for cell in cells]

    def _job_return(self, overrides: Sequence[str], tree: Any, row: Any) -> JobReturn:
        value = row.get(self.fields.get("objective", "images_per_second"))
        is_number = (
            value is not None and value == value
        )  # tables hold NaN where nothing was measured
        returned = JobReturn(overrides=overrides, cfg=OmegaConf.create(tree))
        returned.status = JobStatus.COMPLETED
        returned.return_value = value if is_number else None
        return returned
