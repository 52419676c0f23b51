"""What goes through `hydra.main`: its flags that show something, launchers that are not vitsweep's."""

import os
import sys
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any

import hydra as hydra_core
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vitsweep import extras
from vitsweep.api.session import require_rounds, session_of
from vitsweep.cli.cells import (
    MULTIRUN,
    ONE_RUN,
    QUIET,
    check_words,
    exit_code,
    finish,
    is_override,
)
from vitsweep.composition import hydra
from vitsweep.composition.composer import ComposedCell, Composer, belongs_to_the_sweep
from vitsweep.composition.grid import named
from vitsweep.composition.hydra import (
    hydra_error_sentence,
    parse_overrides,
    refuse_ignored,
    value_override,
)
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.job_environment import environment_rank
from vitsweep.launchers.base import LaunchResult
from vitsweep.launchers.external_ranks import run_in_place, run_rank
from vitsweep.launchers.local import run_unlocked
from vitsweep.planning.machine_defaults import cells_for
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.store import Store
from vitsweep.results.sweeps import held, sweep_argument
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine

HYDRA_SHOWS = ("-c", "--cfg", "-i", "--info", "--hydra-help")
"""Flags that make Hydra print something instead of running."""


def run_hydra(arguments: Sequence[str]) -> int:
    """Compose and launch through Hydra; a single cell is a sweep of one.

    Raises:
        VitsweepError: what was typed is wrong.
        SystemExit: with the exit code of what ran, if it is not 0.
    """
    sys.argv = ["vitsweep", *_for_hydra(arguments)]  # the name in Hydra's usage and in its scripts

    def task(config: object) -> None:
        """Only stock launchers of Hydra call it."""
        run_composed()

    hydra.confine()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise: it would print a hint and exit with 1
    try:
        hydra_core.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(
            task
        )()
    except (HydraException, OmegaConfBaseException) as error:
        raise BadValueError(
            hydra_error_sentence("The command cannot be composed", error)
        ) from error
    except ValueError as error:
        if not _is_raised_by_hydra(error):
            raise
        raise BadValueError(hydra_error_sentence("Hydra refuses the command", error)) from error
    except SystemExit as left:
        if left.code == 1:  # Hydra's code of what it refuses by itself, such as `--package nosuch`
            raise SystemExit(ExitCode.bad_input) from left
        raise
    return ExitCode.ok


def _is_raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra's own code raised an error, and nothing that it called."""
    places = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return str(places[-1]).startswith("hydra.")


def _for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with what belongs to cells left to our sweeper.

    Raises:
        VitsweepError: several cells are asked for without `-m`, or a word is no override.
    """
    if any(a.split("=")[0] in HYDRA_SHOWS for a in arguments):
        return list(arguments)
    check_words(arguments)
    typed = [a for a in arguments if is_override(a)]
    adds_conf = any(a.startswith(("--config-", "hydra.searchpath")) for a in arguments)
    refuse_ignored(typed, has_own_conf=not adds_conf)
    flags = [a for a in arguments if a not in (*typed, *MULTIRUN, *ONE_RUN, *QUIET)]
    return ["--multirun", *flags, *hide_from_hydra(typed)]


def hide_from_hydra(overrides: Sequence[str]) -> list[str]:
    """Write the overrides of cells as sweeps of one value, which Hydra leaves to the sweeper.

    Before a sweep Hydra composes one configuration from all that is not swept. It would refuse
    `precision=O1,O2 precision.loss_scale=128`, because the default precision has no such key, and
    its error for a mistyped group names no alternatives. What `sweep.*` and `hydra.*` say stays as typed.

    Raises:
        BadValueError: an override cannot be read.
    """
    return [_hidden(override) for override in parse_overrides(overrides)]


def _hidden(override: Override) -> str:
    if belongs_to_the_sweep(override) or override.is_sweep_override() or override.is_delete():
        return str(override.input_line)
    key, value = override.get_key_element(), hydra.own_text(override) or "''"
    if override.value() is None:
        return f"{key}={value},{value}"  # Hydra refuses `choice(null)`; equal cells are one
    return f"{key}=choice({value})"


def run_part(arguments: Sequence[str]) -> int:
    """Run this process's part of a cell; rank 0 shows its row and where it is kept."""
    measured = run_in_place(arguments)
    if measured is None:
        return ExitCode.ok
    result, settings = measured
    from vitsweep.cli.summary import summarize  # charts, which rank 0 alone needs

    progress = open_console(stderr=True)
    with held(result.store, progress):
        return exit_code(summarize(result, progress, with_report=settings.report))


def run_composed() -> None:
    """Run the cell that a stock launcher of Hydra (submitit, joblib) is running in this process.

    A task of several is a rank of the cell; a task alone starts the cell's ranks on its node.
    """
    cell, composer = running_cell()
    place = environment_rank()
    if place is not None and place[2] > 1:
        run_rank(cell, composer)
    else:
        run_unlocked(cell, sweep_settings(cell.tree), composer)


# What the launchers and the sweeper of the Hydra plugin call.


def sweep_in_hydra(
    arguments: Sequence[str], config: DictConfig, loader: Any, launcher: Launcher
) -> Any:
    """Expand `arguments` into cells, and hand them to the launcher.

    A `CellLauncherPlugin` takes all cells at once, already composed. Any other launcher of Hydra gets lists
    of overrides, as from Hydra's own sweeper.

    Raises:
        VitsweepError: an override is wrong, or the launcher cannot do what is asked of it.
        SystemExit: 3 where cells were not measured.
        SweepStopped: the user stopped it.
    """
    composer = composer_of(config, loader)
    if hasattr(launcher, "launch_cells"):  # Hydra loads the class of a plugin once more
        progress = open_console(stderr=True)
        if code := finish(session_of(arguments, config, composer, launcher, progress)):
            raise SystemExit(code)
        return None
    cells, sweep, _ = cells_for(arguments, composer, Machine.here())
    settings = hydra.plain_resolved(config) | {"sweep": sweep}
    require_rounds(launcher, hydra.choice(config, "launcher"), sweep_settings(settings), arguments)
    tracker = extras.tracker(settings.get("tracker"))
    returned = _launch_stock(launcher, cells, config)
    _summarize_stock(cells, settings, composer, tracker)
    return returned


def _summarize_stock(
    cells: Sequence[ComposedCell], config: Mapping[str, Any], composer: Composer, tracker: Any
) -> None:
    """Show what a stock launcher ran, or say how to see it where the cells ran on other nodes."""
    from vitsweep.cli.summary import summarize

    settings, progress = sweep_settings(config), open_console(stderr=True)
    plan, store = plan_of(cells, Machine.here(), composer), Store(settings.path)
    if not plan.entries.keys() <= set(store.cell_ids()):
        progress.print(f"`vitsweep report {sweep_argument(store)}` shows what was measured.")
        return
    with held(store, progress):
        result = LaunchResult(store=store, plan=plan)
        rows = summarize(result, progress, tracker, with_report=settings.report)
    if code := exit_code(rows):
        raise SystemExit(code)


def composer_of(config: DictConfig, loader: Any) -> Composer:
    """Return a composer over the configuration of a running Hydra application."""
    return Composer(loader, config.hydra.job.config_name, list(config.hydra.overrides.hydra))


def running_cell() -> tuple[ComposedCell, Composer]:
    """Return the cell that a stock launcher of Hydra is running in this process."""
    config = HydraConfig.instance().cfg
    assert config is not None, "called inside a job of Hydra"
    composer = composer_of(config, GlobalHydra.instance().config_loader())
    [cell] = named([composer.compose(list(config.hydra.overrides.task))], composer)
    return cell, composer


def _launch_stock(launcher: Launcher, cells: Sequence[ComposedCell], config: DictConfig) -> Any:
    """Hand the overrides of all cells to a launcher of Hydra's own (basic, joblib, submitit).

    Raises:
        BadValueError: cells ask for different resources, which stock submitit would ignore; or submitit
            cannot reach Slurm.
    """
    if "submitit" in str(OmegaConf.select(config, "hydra.launcher._target_")):
        _refuse_varying_resources(cells)
    # a cell alone cannot tell it
    name = value_override("sweep.name", cells[0].tree["sweep"]["name"])
    try:
        return launcher.launch([[*cell.overrides, name] for cell in cells], initial_job_idx=0)
    except RuntimeError as error:  # submitit's: sbatch failed, or there is no srun
        if type(error).__name__ != "FailedJobError" and "srun" not in str(error):
            raise
        raise BadValueError(
            f"submitit did not run the cells: {str(error).splitlines()[0]}. Use "
            "`hydra/launcher=slurm`, vitsweep's own, on a cluster, or `hydra/launcher=local` here."
        ) from error


def _refuse_varying_resources(cells: Sequence[ComposedCell]) -> None:
    """Stock submitit sends one array with one `--nodes`, whatever the cells ask for (hydra#2874)."""
    first = cells[0].tree["resources"]
    varying = {k for cell in cells for k, v in cell.tree["resources"].items() if v != first.get(k)}
    if varying:
        knobs = ", ".join(f"`resources.{key}`" for key in sorted(varying))
        raise BadValueError(
            f"{knobs} vary over the cells, but hydra-submitit-launcher requests the same for all "
            "of them: a scaling curve made so is false. Use `hydra/launcher=slurm` or `local`."
        )
