"""The launcher for this machine."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hydra_plugins.vitsweep_launchers.plugin import CellLauncherPlugin

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest, LaunchResult
    from vitsweep.launchers.settings import LocalSettings
    from vitsweep.spec.resources import Machine


class LocalLauncher(CellLauncherPlugin):
    """Runs every cell here, in fresh processes of its own (`vitsweep.launchers.local`).

    Args:
        fields: everything in conf/hydra/launcher/local.yaml.
    """

    can_choose_rounds = True

    def machine(self) -> "Machine":
        """Return this machine; the launcher's fields are checked for `plan` too.

        Raises:
            BadValueError: a field is wrong.
        """
        from vitsweep.spec.resources import Machine

        self.settings()
        return Machine.here()

    def launch_cells(self, request: "LaunchRequest") -> "AbstractContextManager[LaunchResult]":
        """Measure what is missing, one block after the other."""
        from vitsweep.launchers.local import launch

        return launch(request, self.settings())

    def settings(self) -> "LocalSettings":
        """Return the fields, typed and checked."""
        from vitsweep.launchers.settings import local_settings

        return local_settings(self.fields)
