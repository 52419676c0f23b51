"""`hydra/sweeper=optuna`: the sweeper of hydra-optuna-sweeper, set up to maximize throughput."""

import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from vitsweep.errors import VitsweepError

CHOICE = "hydra/sweeper=optuna"
NO_TRIAL = "No trials are completed yet."
"""What optuna says when asked for the best of no trial."""

_DEFAULTS = ("hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1.0")
"""Overrides and no YAML: Hydra refuses a YAML beside a registered schema of the same name.

The plugin itself minimizes, and ends the search at the first cell that does not fit into memory.
"""
_PLUGIN = "hydra-optuna-sweeper"
_INSTALL = "`pip install 'vitsweep[optuna]'`"


def with_optuna_defaults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, after vitsweep's defaults where they choose optuna: the user's win.

    Raises:
        VitsweepError: hydra-optuna-sweeper or an optuna that it supports is not installed, or a
            plan is asked for.
    """
    if CHOICE not in arguments:
        return list(arguments)
    _require_packages()
    if "hydra.sweeper.plan_only=true" in arguments:
        raise VitsweepError(
            f"`plan` lists the cells of a grid; with `{CHOICE}` each batch of cells is chosen from the "
            "results of those before: leave `plan` out, or the sweeper."
        )
    _show_log()
    return [*_DEFAULTS, *arguments]


def _require_packages() -> None:
    try:
        version(_PLUGIN)
        found = version("optuna")
    except PackageNotFoundError as error:
        raise VitsweepError(f"`{CHOICE}` needs {error.name}: {_INSTALL}.") from None
    if int(found.partition(".")[0]) != 2:
        raise VitsweepError(
            f"`{CHOICE}`: {_PLUGIN} works with optuna 2, and optuna {found} is installed: {_INSTALL}."
        )


def _show_log() -> None:
    """Show the sampler and, at the end, the best trial: Hydra's own logging is off."""
    log = logging.getLogger("hydra_plugins.hydra_optuna_sweeper._impl")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
