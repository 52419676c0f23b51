"""Launchers of Hydra that know nothing of cells: what they are given, and what is refused to them."""

from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf

from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.overrides import value_override
from vitsweep.composition.sweep_name import named
from vitsweep.errors import BadValueError


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


def launch_stock(launcher: Launcher, cells: Sequence[ComposedCell], config: DictConfig) -> Any:
    """Hand the overrides of all cells to a launcher of Hydra's own (basic, joblib, submitit).

    Raises:
        BadValueError: cells ask for different resources, which stock submitit would ignore.
    """
    if "submitit" in _target(config):
        _refuse_varying_resources(cells)
    name = value_override(
        "sweep.name", cells[0].tree["sweep"]["name"]
    )  # a cell alone cannot tell it
    return launcher.launch([[*cell.overrides, name] for cell in cells], initial_job_idx=0)


def refuse_plan_of(config: DictConfig) -> None:
    """Refuse `plan` with a launcher that does not say which node it plans for.

    Raises:
        BadValueError: always.
    """
    raise BadValueError(
        f"`plan` needs a launcher of vitsweep, such as `hydra/launcher=local`; not {_target(config)}."
    )


def _target(config: DictConfig) -> str:
    return str(OmegaConf.select(config, "hydra.launcher._target_"))


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
