"""The launcher for clusters with Slurm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn

from hydra_plugins.vitsweep_launchers.local import LocalLauncher

if TYPE_CHECKING:
    from vitsweep.composition.composed_cell import ComposedCell
    from vitsweep.composition.composer import Composer


class SlurmLauncher(LocalLauncher):
    """Submits cells as job arrays through submitit (`vitsweep.launchers.slurm.submit.launch`).

    Args:
        fields: everything in conf/hydra/launcher/slurm.yaml.
    """

    def launch_cells(
        self,
        asked: "list[ComposedCell]",
        config: dict[str, Any],
        composer: "Composer",
        **ending: Any,
    ) -> Any:
        """Submit cells; returns what `launchers.slurm.submit.launch.launch` does, `ending` included."""
        from vitsweep.launchers.slurm.submit.launch import launch

        return launch(asked, config, self.plain_fields(), self._composer(), **ending)

    def plan_cells(
        self, asked: "list[ComposedCell]", config: dict[str, Any], composer: "Composer"
    ) -> Any:
        """Show what `launch_cells` would do, for the nodes of the cluster."""
        from vitsweep.launchers.slurm.submit.cluster import machine_of
        from vitsweep.launchers.slurm.submit.slurm_settings import settings_of
        from vitsweep.planning.plan_table import plan

        fields = self.plain_fields()
        node = machine_of(settings_of(fields))
        return plan(asked, config, fields, self._composer(), node)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the cells of a stock sweeper (basic, optuna), which waits for their results."""
        from vitsweep.launchers.slurm.submit.launch import checked_for_waiting

        checked_for_waiting(self.fields)
        return super().launch(job_overrides, initial_job_idx)

    def plain_fields(self) -> dict[str, Any]:
        """Return the fields as plain containers."""
        from omegaconf import OmegaConf

        plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(self.fields), resolve=True)
        return plain
