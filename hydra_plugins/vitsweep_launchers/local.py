"""The launcher for this machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from vitsweep.composition.composed_cell import ComposedCell
    from vitsweep.composition.composer import Composer


class LocalLauncher(Launcher):
    """Runs every cell here, in fresh processes of its own (`vitsweep.launchers.local`).

    Args:
        fields: everything in conf/hydra/launcher/local.yaml.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what composing needs."""
        self.config = config
        self.loader = hydra_context.config_loader

    def launch_cells(
        self,
        asked: "list[ComposedCell]",
        config: dict[str, Any],
        composer: "Composer",
        **ending: Any,
    ) -> Any:
        """Run cells; what comes back is `vitsweep.launchers.local.launch`'s, `ending` included."""
        from vitsweep.launchers.local import launch

        return launch(asked, config, self.fields, self._composer(), **ending)

    def plan_cells(
        self, asked: "list[ComposedCell]", config: dict[str, Any], composer: "Composer"
    ) -> Any:
        """Show what `launch_cells` would do."""
        from vitsweep.planning.plan_table import plan

        return plan(asked, config, self.fields, self._composer())

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the cells of a stock sweeper (basic, optuna); each returns its objective.

        A cell that was not measured returns NaN, which optuna counts as a failed trial: no cell
        ends the sweep of the others.
        """
        from vitsweep.composition.hydra_internals import plain_resolved

        composer = self._composer()
        asked = [composer.compose(list(overrides)) for overrides in job_overrides]
        rows = self.launch_cells(asked, plain_resolved(self.config), composer)
        return [self._returned(cell, row) for cell, row in zip(asked, rows, strict=True)]

    def _composer(self) -> Any:
        from vitsweep.launchers.dispatch import composer_of

        return composer_of(self.config, self.loader)

    def _returned(self, cell: "ComposedCell", row: Any) -> JobReturn:
        value = row.get(self.fields.get("objective", "images_per_second"))
        returned = JobReturn(overrides=cell.overrides, cfg=OmegaConf.create(cell.tree))
        returned.status = JobStatus.COMPLETED
        returned.return_value = float("nan") if value is None else value
        return returned
