"""A sweep, from the overrides that Hydra parsed to the tables that the user sees."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from vitsweep.api.measure import Row, measured, require_racing, search_limits, searches_of
from vitsweep.api.session import Session
from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import ExitCode
from vitsweep.launchers.base import CellLauncher, LaunchResult, locked
from vitsweep.launchers.dispatch import composer_of, launch_stock, refuse_plan_of
from vitsweep.planning.freeze import plan_of, store_of
from vitsweep.planning.limit_search import Search, Searches
from vitsweep.results.find import sweep_argument
from vitsweep.spec.machine import Machine


def multirun(
    arguments: Sequence[str], config: DictConfig, loader: Any, launcher: Launcher, plan_only: bool
) -> Any:
    """Expand `arguments` into cells, and plan them or hand them to the launcher.

    A `CellLauncher` takes all cells at once, already composed. Any other launcher of Hydra gets lists
    of overrides, as from Hydra's own sweeper.

    Raises:
        VitsweepError: an override is wrong, or the launcher cannot do what is asked of it.
        SystemExit: 3 where cells were not measured.
        SweepStopped: the user stopped it.
    """
    composer = composer_of(config, loader)
    cells = expand(arguments, composer)
    settings = hydra_internals.plain_resolved(config)
    settings["sweep"]["name"] = cells[0].tree["sweep"]["name"]  # as `expand` named it
    if not isinstance(launcher, CellLauncher):
        if plan_only:
            refuse_plan_of(config)
        if sweep_settings(settings).search == "race":
            require_racing(launcher)
        returned = launch_stock(launcher, cells, config)
        _summarize_stock(cells, settings, composer)
        return returned
    session = session_of(launcher, cells, settings, composer)
    searches = searches_of(session)
    if plan_only:
        return _plan(session, searches)
    if searches:
        return _search(session, searches)
    rows = run_cells(session)
    from vitsweep.cli.summary import exit_code

    if code := exit_code(rows):
        raise SystemExit(code)
    return rows


def session_of(
    launcher: CellLauncher,
    cells: Sequence[ComposedCell],
    config: Mapping[str, Any] | DictConfig,
    composer: Composer,
) -> Session:
    """Return the session of a command whose configuration Hydra composed."""
    plain = hydra_internals.plain_resolved(config) if isinstance(config, DictConfig) else config
    return Session(
        cells=cells, config=plain, composer=composer, launcher=launcher, console=open_console()
    )


def run_cells(session: Session) -> list[Row]:
    """Measure what is missing of the cells and show it; return the row of each, in their order.

    Raises:
        SweepStopped: the user stopped it.
    """
    from vitsweep.cli.summary import summarize  # pandas and charts, which a plan does not need

    with measured(session) as result:
        return summarize(
            result, session.console, session.tracker, with_report=session.settings.report
        )


def _summarize_stock(
    cells: Sequence[ComposedCell], config: Mapping[str, Any], composer: Composer
) -> None:
    """Show what a stock launcher ran, or say how to see it where the cells ran on other nodes."""
    from vitsweep.cli.summary import exit_code, summarize

    settings, console = sweep_settings(config), open_console()
    plan, store = plan_of(cells, Machine.here(), composer), store_of(settings)
    if any(not store.cell(cell_id).exists() for cell_id in plan.entries):
        console.print(
            f"`vitsweep report {sweep_argument(store)}` shows what was measured.", highlight=False
        )
        return
    with locked(store, console):
        result = LaunchResult(store=store, plan=plan)
        rows = summarize(result, console, config.get("tracker"), with_report=settings.report)
    if code := exit_code(rows):
        raise SystemExit(code)


def _plan(session: Session, searches: Searches | None) -> list[dict[str, Any]]:
    from vitsweep.planning.plan_request import CURRENT
    from vitsweep.planning.plan_table import plan

    launcher = session.launcher
    return plan(
        searches.first() if searches else session.cells,
        session.settings,
        session.composer,
        launcher.machine(),
        launcher.with_paired_baselines,
        CURRENT.get(),
    )


def _search(session: Session, searches: Searches) -> list[Search]:
    """Run the rounds of a search for limits, and show what it found.

    Raises:
        SystemExit: 3 where a search ended before its limit was found.
    """
    from vitsweep.cli.summary import summarize_limits

    found = search_limits(session, searches)
    settings = session.settings
    summarize_limits(store_of(settings), searches.key, session.console, with_report=settings.report)
    if any(search.failure for search in found):
        raise SystemExit(ExitCode.not_all_measured)
    return found
