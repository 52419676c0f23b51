"""A sweep, from the overrides that Hydra parsed to the tables that the user sees."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_name import AUTO
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.launchers.base import CellLauncher, LaunchRequest, LaunchResult, locked
from vitsweep.launchers.dispatch import composer_of, launch_stock, refuse_plan_of
from vitsweep.planning.freeze import plan_of, store_of
from vitsweep.planning.limit_search import Search, Searches, limit_of
from vitsweep.results.trackers import check_tracker
from vitsweep.spec.machine import Machine

Row = Mapping[str, Any]


def multirun(
    arguments: Sequence[str], config: DictConfig, loader: Any, launcher: Launcher, plan_only: bool
) -> Any:
    """Expand `arguments` into cells, and plan them or hand them to the launcher.

    A `CellLauncher` takes all cells at once, already composed. Any other launcher of Hydra gets lists
    of overrides, as from Hydra's own sweeper.

    Raises:
        VitsweepError: an override is wrong, or the launcher cannot do what is asked of it.
        SystemExit: 3 where cells were not measured, 130 after an interruption.
    """
    composer = composer_of(config, loader)
    cells = expand(arguments, composer)
    settings = hydra_internals.plain_resolved(config)
    settings["sweep"]["name"] = cells[0].tree["sweep"]["name"]  # as `expand` named it
    if not isinstance(launcher, CellLauncher):
        if plan_only:
            refuse_plan_of(config)
        returned = launch_stock(launcher, cells, config)
        _summarize_stock(cells, settings, composer)
        return returned
    check_tracker(settings.get("tracker") or {})
    limit = limit_of(sweep_settings(settings).limit, cells)
    if plan_only:
        first = Searches(cells, limit, composer).first() if limit else cells
        return _plan(launcher, first, settings, composer)
    if limit:
        return _search(Searches(cells, limit, composer), launcher, settings)
    rows = run_cells(launcher, cells, settings, composer)
    from vitsweep.cli.summary import exit_code

    if code := exit_code(rows):
        raise SystemExit(code)
    return rows


def run_cells(
    launcher: CellLauncher,
    cells: Sequence[ComposedCell],
    config: Mapping[str, Any] | DictConfig,
    composer: Composer,
) -> list[Row]:
    """Measure what is missing of the cells and show it; return the row of each, in their order.

    Raises:
        SystemExit: 130 after an interruption.
    """
    from vitsweep.cli.summary import summarize  # pandas and charts, which a plan does not need

    settings = _plain(config)
    request = _request(cells, settings, composer)
    with launcher.launch_cells(request) as result:
        return summarize(result, request.console, settings.get("tracker"))


def _summarize_stock(
    cells: Sequence[ComposedCell], config: Mapping[str, Any], composer: Composer
) -> None:
    """Show what a stock launcher ran, or say how to see it where the cells ran on other nodes."""
    from vitsweep.cli.summary import exit_code, summarize

    settings, console = sweep_settings(config), open_console()
    plan, store = plan_of(cells, Machine.here(), composer), store_of(settings)
    if any(not store.cell(cell_id).exists() for cell_id in plan.entries):
        console.print(f"`vitsweep report {store.name}` shows what was measured.", highlight=False)
        return
    with locked(store, console):
        rows = summarize(LaunchResult(store=store, plan=plan), console, config.get("tracker"))
    if code := exit_code(rows):
        raise SystemExit(code)


def _plan(
    launcher: CellLauncher,
    cells: Sequence[ComposedCell],
    config: dict[str, Any],
    composer: Composer,
) -> list[dict[str, Any]]:
    from vitsweep.planning.plan_table import plan

    return plan(
        cells, sweep_settings(config), composer, launcher.machine(), launcher.with_paired_baselines
    )


def _search(searches: Searches, launcher: CellLauncher, config: dict[str, Any]) -> list[Search]:
    """Run the rounds of a search for limits, and show what it found.

    Raises:
        BadValueError: two cells of the grid are the same one.
        SystemExit: 3 where a search ended before its limit was found.
    """
    from vitsweep.cli.summary import rows_of, summarize_limits

    launcher.check_that_results_are_awaited()
    key = searches.key

    def run_round(number: int, probed: list[ComposedCell]) -> Sequence[Row]:
        values = ", ".join(cell.overrides[-1].partition("=")[2] for cell in probed)
        print(f"Round {number} of the search for the largest `{key}`: {values}", flush=True)
        request = _request(probed, config, searches.composer)
        with launcher.launch_cells(request) as result:
            rows = rows_of(result, request.console)
        if len(rows) != len(probed):
            raise BadValueError(
                f"{len(probed) - len(rows)} cells of the grid are the same as others; `sweep.limit` "
                "needs each once: leave out what changes nothing."
            )
        return rows

    found = searches.run(run_round)
    summarize_limits(config, key)
    if any(search.failure for search in found):
        raise SystemExit(ExitCode.not_all_measured)
    return found


def _request(
    cells: Sequence[ComposedCell], config: Mapping[str, Any], composer: Composer
) -> LaunchRequest:
    settings = sweep_settings(config)
    if settings.name == AUTO:  # of a sweeper of Hydra's own, which composes no sweep
        settings = replace(settings, name=cells[0].tree["sweep"]["name"])
    return LaunchRequest(cells=cells, settings=settings, composer=composer, console=open_console())


def _plain(config: Mapping[str, Any] | DictConfig) -> Mapping[str, Any]:
    return hydra_internals.plain_resolved(config) if isinstance(config, DictConfig) else config
