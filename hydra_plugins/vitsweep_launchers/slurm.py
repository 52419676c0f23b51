"""The launcher for clusters with Slurm."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hydra_plugins.vitsweep_launchers.plugin import CellLauncherPlugin

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest, LaunchResult
    from vitsweep.launchers.slurm.submit.settings import SlurmSettings
    from vitsweep.planning.sweep_plan import SweepPlan
    from vitsweep.spec.resources import Machine


class SlurmLauncher(CellLauncherPlugin):
    """Submits cells as job arrays through submitit (`vitsweep.launchers.slurm.submit.launch`).

    Args:
        fields: everything in conf/hydra/launcher/slurm.yaml.
    """

    can_choose_rounds = True

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
        from vitsweep.launchers.slurm.submit.sbatch import without_unpaired_baselines

        return without_unpaired_baselines(plan, self.settings())

    def check_that_results_are_awaited(self) -> None:
        """Refuse `wait=false` to a sweeper that learns from results."""
        from vitsweep.launchers.slurm.submit.launch import require_waiting

        require_waiting(self.settings())

    def settings(self) -> "SlurmSettings":
        """Return the fields, typed and checked."""
        from omegaconf import OmegaConf

        from vitsweep.launchers.slurm.submit.settings import settings_of

        plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(self.fields), resolve=True)
        return settings_of(plain)
