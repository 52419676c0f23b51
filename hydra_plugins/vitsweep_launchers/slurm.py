"""The launcher for clusters with Slurm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn

from hydra_plugins.vitsweep_launchers.local import LocalLauncher

if TYPE_CHECKING:
    from vitsweep.sweep.asked import Asked
    from vitsweep.sweep.compose import Composer


class SlurmLauncher(LocalLauncher):
    """Submits cells as job arrays through submitit (`vitsweep.sweep.slurm.launch`).

    Args:
        fields: everything in conf/hydra/launcher/slurm.yaml.
    """

    def launch_cells(
        self, asked: "list[Asked]", config: dict[str, Any], composer: "Composer", **ending: Any
    ) -> Any:
        """Submit cells; what comes back is `vitsweep.sweep.slurm.launch.launch`'s, `ending` included."""
        from vitsweep.sweep.slurm.launch import launch

        return launch(asked, config, self.plain_fields(), self._composer(), **ending)

    def plan_cells(self, asked: "list[Asked]", config: dict[str, Any], composer: "Composer") -> Any:
        """Show what `launch_cells` would do, for the nodes of the cluster."""
        from vitsweep.sweep.plan import plan
        from vitsweep.sweep.slurm.settings import settings_of
        from vitsweep.sweep.slurm.site import machine_of

        fields = self.plain_fields()
        node = machine_of(settings_of(fields))
        return plan(asked, config, fields, self._composer(), node)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the cells of a stock sweeper (basic, optuna), which waits for their results."""
        from vitsweep.sweep.slurm.launch import checked_for_waiting

        checked_for_waiting(self.fields)
        return super().launch(job_overrides, initial_job_idx)

    def plain_fields(self) -> dict[str, Any]:
        """Return the fields as plain containers."""
        from omegaconf import OmegaConf

        plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(self.fields), resolve=True)
        return plain
