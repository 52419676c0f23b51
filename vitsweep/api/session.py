"""Session: the cells of one command or call, composed and named, with the launcher that measures them."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.conf_dir import conf_dir
from vitsweep.composition.deferred_overrides import belongs_to_the_sweep
from vitsweep.composition.grid import expand
from vitsweep.composition.override_text import parse_overrides
from vitsweep.composition.refused_overrides import refuse_ignored
from vitsweep.composition.sweep_name import AUTO
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.launchers.base import CellLauncher, LaunchRequest
from vitsweep.results.user_metrics import check_metrics
from vitsweep.spec.from_yaml import target_class

CONFIG = "config"


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one command or call wants measured, before anything has run.

    Attributes:
        cells: composed, in the order in which their rows are shown.
        config: nodes `sweep` and `tracker` of the configuration, as plain containers.
        composer: composes baselines, and the values that a search tries.
        launcher: measures cells.
        console: where progress and notices are printed.
        command: what to type for the same; empty where `sys.argv` says so.

    Raises:
        BadValueError: a column of the user's is wrong, or its function cannot be imported.
    """

    cells: Sequence[ComposedCell]
    config: Mapping[str, Any]
    composer: Composer
    launcher: CellLauncher
    console: Console
    command: str = ""

    def __post_init__(self) -> None:
        check_metrics(self.metrics)

    @property
    def settings(self) -> SweepSettings:
        """The node `sweep`, checked; an automatic name is that of the cells."""
        settings = sweep_settings(self.config)
        if settings.name == AUTO:
            settings = replace(settings, name=self.cells[0].tree["sweep"]["name"])
        return settings

    @property
    def tracker(self) -> Mapping[str, Any]:
        """The node `tracker`: where records are mirrored."""
        return self.config.get("tracker") or {}

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Definitions of the user's columns."""
        return (self.config.get("metric") or {}).get("columns") or {}

    def request(self, cells: Sequence[ComposedCell] = ()) -> LaunchRequest:
        """Return what the launcher is given: all cells, or some of a search."""
        return LaunchRequest(
            cells=cells or self.cells,
            settings=self.settings,
            composer=self.composer,
            console=self.console,
            command=self.command,
            metrics=self.metrics,
        )


def open_session(
    overrides: Sequence[str], console: Console, config_dir: str | Path | None = None
) -> Session:
    """Compose the cells of some overrides, as `python -m vitsweep -m` does.

    Args:
        overrides: as typed.
        console: where progress and notices are printed.
        config_dir: folder with more choices, groups and named sweeps (`--config-dir`).

    Raises:
        BadValueError: an override is wrong, or chooses a launcher or sweeper that is not vitsweep's;
            a column of the user's cannot be computed.
    """
    overrides = list(overrides)
    refuse_ignored(overrides, has_own_conf=config_dir is None)
    loader = hydra_internals.open_loader(conf_dir(), config_dir)
    parsed = dict(zip(overrides, parse_overrides(overrides, loader), strict=True))
    of_hydra = [text for text, override in parsed.items() if override.is_hydra_override()]
    of_sweep = [text for text, override in parsed.items() if belongs_to_the_sweep(override)]
    composer = Composer(loader, CONFIG, of_hydra)
    config = hydra_internals.compose_sweep(loader, CONFIG, of_sweep)
    launcher = _launcher(config)
    sweeper = OmegaConf.select(config, "hydra.runtime.choices.hydra/sweeper")
    if sweeper != "vitsweep":
        raise BadValueError(
            f"`hydra/sweeper={sweeper}`: from Python vitsweep runs grids of its own; type `python -m "
            "vitsweep -m ...` for another sweeper."
        )
    cells = expand([o for o in overrides if o not in of_hydra], composer)
    plain = hydra_internals.plain_resolved(config)
    plain["sweep"]["name"] = cells[0].tree["sweep"]["name"]
    extra = ["--config-dir", str(config_dir)] if config_dir else []
    words = ["python", "-m", "vitsweep", *extra, "-m", *overrides]
    return Session(
        cells=cells,
        config=plain,
        composer=composer,
        launcher=launcher,
        console=console,
        command=shlex.join(words),
    )


def _launcher(config: DictConfig) -> CellLauncher:
    """Make the launcher that the configuration chooses.

    Raises:
        BadValueError: it is none that measures cells.
    """
    kind = target_class(dict(config.hydra.launcher), "hydra/launcher")
    if not all(hasattr(kind, method) for method in ("machine", "launch_cells")):
        chosen = OmegaConf.select(config, "hydra.runtime.choices.hydra/launcher")
        raise BadValueError(
            f"`hydra/launcher={chosen}` runs no cells from Python: use `local` or `slurm`, or type "
            "`python -m vitsweep -m ...`."
        )
    launcher: CellLauncher = instantiate(config.hydra.launcher)
    return launcher
