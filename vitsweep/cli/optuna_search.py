"""`hydra/sweeper=optuna`: the sweeper of hydra-optuna-sweeper, set up to maximize throughput."""

import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from traceback import walk_tb

from vitsweep.errors import VitsweepError

CHOICE = "hydra/sweeper=optuna"
NO_TRIAL = "No trials are completed yet."
"""What optuna says when asked for the best of no trial."""

_DEFAULTS = ("hydra.sweeper.direction=maximize", "hydra.sweeper.max_failure_rate=1.0")
"""Overrides and no YAML: Hydra refuses a YAML beside a registered schema of the same name.

The plugin itself minimizes, and ends the search at the first cell that does not fit into memory.
"""
_OF_A_GRID = ("sweep=", "sweep.axes", "sweep.cells", "sweep.zip", "sweep.limit", "sweep.search=")
_PLUGIN = "hydra-optuna-sweeper"
_INSTALL = "`pip install 'vitsweep[optuna]'`"


def with_optuna_defaults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, after vitsweep's defaults where they choose optuna: the user's win.

    Raises:
        VitsweepError: hydra-optuna-sweeper or an optuna that it supports is not installed, or a
            plan, a grid, a named sweep or a `glob` is asked for.
    """
    if CHOICE not in arguments:
        return list(arguments)
    _require_packages()
    if "hydra.sweeper.plan_only=true" in arguments:
        raise VitsweepError(
            f"`plan` lists the cells of a grid; with `{CHOICE}` each batch of cells is chosen from the "
            "results of those before: leave `plan` out, or the sweeper."
        )
    if "hydra/sweeper/sampler=grid" in arguments:
        raise VitsweepError(
            "`hydra/sweeper/sampler=grid`: a grid is what a sweep is without optuna, and optuna's ends "
            f"with an error where its last cell fails: leave out `{CHOICE}` and the sampler."
        )
    for argument in arguments:
        if argument.lstrip("+").startswith(_OF_A_GRID):
            raise VitsweepError(
                f"`{argument}` describes the cells of a grid, and `{CHOICE}` chooses cells by itself: leave "
                "it out and name what optuna may choose from, such as `precision=O1,O2`."
            )
        if "=glob(" in argument:
            raise VitsweepError(
                f"`{argument}`: `{CHOICE}` cannot read `glob`: list the choices, such as "
                "`precision=O1,O2`."
            )
    _show_log()
    return [*_DEFAULTS, *arguments]


def is_of_optuna(error: BaseException) -> bool:
    """Tell whether optuna or its plugin raised an error, such as of a direction that it does not know."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return modules[-1].startswith(("optuna.", "hydra_plugins.hydra_optuna_sweeper."))


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
