"""From Hydra's multirun to a launcher: what `VitsweepSweeper` does, without being a plugin."""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.planning.limit_search import Search, Searches, limit_of


def composer_of(config: DictConfig, loader: Any) -> Composer:
    """Return a composer over the configuration of a running Hydra application."""
    return Composer(loader, config.hydra.job.config_name, list(config.hydra.overrides.hydra))


def running_cell() -> tuple[ComposedCell, Composer]:
    """Return the cell that a stock launcher of Hydra is running in this process."""
    config = HydraConfig.instance().cfg
    assert config is not None, "called inside a job of Hydra"
    composer = composer_of(config, GlobalHydra.instance().config_loader())
    return composer.compose(list(config.hydra.overrides.task)), composer


def dispatch(
    arguments: Sequence[str], config: DictConfig, loader: Any, launcher: Launcher, plan_only: bool
) -> Any:
    """Expand `arguments` and hand the cells to the launcher.

    vitsweep's launchers take all cells at once, already composed. Any other launcher of Hydra gets
    lists of overrides, as from Hydra's own sweeper.

    Raises:
        BadValueError: an override is wrong, a stock Slurm launcher would ignore `resources`, or
            `sweep.limit` cannot be looked for so.
    """
    composer = composer_of(config, loader)
    cells = expand(arguments, composer)
    if hasattr(launcher, "launch_cells"):
        settings = hydra_internals.plain_resolved(config)
        limit = limit_of(sweep_settings(settings).limit, cells)
        if plan_only:
            first = Searches(cells, limit, composer).first() if limit else cells
            return launcher.plan_cells(first, settings, composer)
        if limit:
            from vitsweep.launchers.slurm.submit.launch import checked_for_waiting

            checked_for_waiting(launcher.fields)
            return search(Searches(cells, limit, composer), launcher, settings)
        from vitsweep.cli.summary import exit_code  # pandas and charts, which a plan does not need

        rows = launcher.launch_cells(cells, settings, composer)
        if code := exit_code(rows):
            raise SystemExit(code)
        return rows
    target = str(OmegaConf.select(config, "hydra.launcher._target_"))
    if plan_only:
        raise BadValueError(
            f"`plan` needs a launcher of vitsweep, `hydra/launcher=local`; not {target}."
        )
    if "submitit" in target:
        refuse_varying_resources(cells)
    return launcher.launch([list(cell.overrides) for cell in cells], initial_job_idx=0)


def search(searches: Searches, launcher: Any, settings: dict[str, Any]) -> list[Search]:
    """Let a launcher run round after round of a search for limits; show what was found.

    Raises:
        BadValueError: two cells of the grid are the same one.
        SystemExit: 3 where a search ended before its limit was found.
    """
    from vitsweep.cli.summary import ENDED_OTHERWISE, finish_search, rows_alone

    key = searches.key

    def run_round(number: int, tried: list[ComposedCell]) -> Sequence[Mapping[str, Any]]:
        values = ", ".join(cell.overrides[-1].partition("=")[2] for cell in tried)
        print(f"Round {number} of the search for the largest `{key}`: {values}", flush=True)
        rows = launcher.launch_cells(tried, settings, searches.composer, ending=rows_alone)
        if len(rows) != len(tried):
            raise BadValueError(
                f"{len(tried) - len(rows)} cells of the grid are the same as others; `sweep.limit` "
                "needs each once: leave out what changes nothing."
            )
        return rows

    found = searches.run(run_round)
    finish_search(settings, key)
    if any(each.ended for each in found):
        raise SystemExit(ENDED_OTHERWISE)
    return found


def refuse_varying_resources(cells: Sequence[ComposedCell]) -> None:
    """Stock submitit sends one array with one `--nodes`, whatever the cells ask for (hydra#2874).

    Raises:
        BadValueError: cells ask for different resources.
    """
    first = cells[0].tree["resources"]
    varying = {k for cell in cells for k, v in cell.tree["resources"].items() if v != first.get(k)}
    if varying:
        knobs = ", ".join(f"`resources.{key}`" for key in sorted(varying))
        raise BadValueError(
            f"{knobs} vary over the cells, but hydra-submitit-launcher requests the same for all "
            "of them: a scaling curve made so is false. Use `hydra/launcher=slurm` or `local`."
        )
