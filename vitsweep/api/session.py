"""Session: the cells of one command or call, composed and named, with the launcher that measures them."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vitsweep import extras
from vitsweep.composition import hydra
from vitsweep.composition.composer import (
    ComposedCell,
    Composer,
    NotLocalError,
    belongs_to_the_sweep,
    is_plain_value,
    set_value,
)
from vitsweep.composition.grid import AUTO
from vitsweep.composition.hydra import (
    key_of,
    other_sweeper,
    parse_overrides,
    plain_value,
    refuse_ignored,
    sweep_override,
    unknown_choice,
    value_override,
)
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.planning.machine_defaults import cells_for
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.results.user_metrics import check_metrics
from vitsweep.spec.from_yaml import target_class, title_of
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine
from vitsweep.words import without_units

if TYPE_CHECKING:
    from vitsweep.launchers.base import LaunchRequest

CONFIG = "config"
SUBMITTED = "submitted"
"""Instead of a status, where a launcher returns before its cells have run."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one command or call wants measured, before anything has run.

    Attributes:
        cells: composed, in the order in which their rows are shown.
        config: nodes `sweep` and `tracker` of the configuration, as plain containers.
        composer: composes baselines, and the values that a search tries.
        launcher: measures cells.
        machine: node that the cells are planned for.
        console: where progress and notices are printed.
        command: what to type for the same; empty where `sys.argv` says so.

    Raises:
        BadValueError: a column of the user's is wrong, or its function cannot be imported.
        VitsweepError: the tracker cannot work here.
    """

    cells: Sequence[ComposedCell]
    config: Mapping[str, Any]
    composer: Composer
    launcher: Any  # a CellLauncherPlugin
    machine: Machine
    console: Console
    command: str = ""

    def __post_init__(self) -> None:
        if self.metrics:
            check_metrics(self.metrics)
        extras.tracker(self.config.get("tracker"))  # refuses what cannot work

    @cached_property
    def settings(self) -> SweepSettings:
        """The node `sweep`, checked; an automatic name is that of the cells."""
        settings = sweep_settings(self.config)
        if settings.name == AUTO:
            settings = replace(settings, name=self.cells[0].tree["sweep"]["name"])
        if not self.launcher.can_choose_rounds:  # every cell gets all its blocks
            settings = replace(settings, prune_slowdown=None)
        return settings

    @property
    def tracker(self) -> Any:
        """What mirrors the cells, see `extras.tracker`; None for nothing."""
        return extras.tracker(self.config.get("tracker"))

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Definitions of the user's columns."""
        return (self.config.get("metric") or {}).get("columns") or {}

    @cached_property
    def searches(self) -> Any:
        """What composes the cells of each round, see `extras.SEARCHES`; None for a grid.

        Raises:
            BadValueError: its settings contradict the grid.
        """
        asked = (at for key, at in extras.SEARCHES.items() if attrgetter(key)(self.settings))
        return next((extras.load(place)(self) for place in asked), None)

    @cached_property
    def plan(self) -> SweepPlan:
        """The cells of the grid, or of the first round of a search, typed and checked, with baselines.

        Raises:
            BadValueError: a value is wrong; all wrong values of all cells are named.
        """
        if own := self._own_code():
            self.console.print(f"Importing and trying {own}.")
        return self.planned_for(self.machine)

    def _own_code(self) -> str:
        """Name models and data of packages or the user's: their import takes seconds."""
        trees = [
            (cell.choices.get(g), cell.tree[g]["target"])
            for cell in self.cells
            for g in ("model", "data")
            if cell.tree.get(g, {}).get("target")
        ]
        return " and ".join(dict.fromkeys(title_of(str(name), target) for name, target in trees))

    def planned_for(self, machine: Machine) -> SweepPlan:
        """Return the same for another node."""
        cells = self.searches.first() if self.searches else self.cells
        return plan_of(cells, machine, self.composer)

    def request(self, plan: SweepPlan | None = None) -> "LaunchRequest":
        """Return what the launcher is given: all cells, or those of a round of a search."""
        from vitsweep.launchers.base import LaunchRequest

        return LaunchRequest(
            plan=plan or self.plan,
            machine=self.machine,
            settings=self.settings,
            console=self.console,
            command=self.command,
            metrics=self.metrics,
            hydra=self.composer.words,
        )


class NotOursError(BadValueError):
    """A launcher is chosen that Hydra alone can run.

    Args:
        choice: as typed, such as `hydra/launcher=basic`.
    """

    def __init__(self, choice: str) -> None:
        super().__init__(
            f"`{choice}` runs no cells from Python: use `local`, `allocation` or `slurm`, or type "
            "`python -m vitsweep -m ...`."
        )
        self.choice = choice


def open_session(
    overrides: Sequence[str],
    console: Console,
    config_dir: str | Path | None = None,
    config_name: str = CONFIG,
    command: str | None = None,
    machine: Machine | None = None,
) -> Session:
    """Compose the cells of some overrides.

    Args:
        overrides: as typed after `python -m vitsweep -m`.
        console: where progress and notices are printed.
        config_dir: folder with more choices, groups and named sweeps (`--config-dir`).
        config_name: file with the defaults list (`--config-name`).
        command: what to type for the same; None writes it from the overrides.
        machine: node that defaults follow; None for the launcher's.

    Raises:
        NotOursError: the launcher is not vitsweep's.
        BadValueError: an override is wrong, or a column of the user's cannot be computed.
    """
    adds_conf = config_dir is not None or config_name != CONFIG
    adds_conf = adds_conf or any(o.startswith("hydra.searchpath") for o in overrides)
    refuse_ignored(overrides, has_own_conf=not adds_conf)
    loader = hydra.open_loader(conf_dir(), config_dir)
    parsed = {str(o.input_line): o for o in parse_overrides(overrides, loader)}
    of_hydra = [text for text, override in parsed.items() if override.is_hydra_override()]
    of_sweep = [text for text, override in parsed.items() if belongs_to_the_sweep(override)]
    try:
        config = hydra.compose_sweep(loader, config_name, of_sweep)
    except BadValueError:
        with suppress(NotLocalError):  # Hydra's own sentence says it
            _name_what_there_is([parsed[text] for text in of_sweep], loader, config_name)
        raise
    if (sweeper := hydra.choice(config, "sweeper")) != "vitsweep":
        raise other_sweeper(f"hydra/sweeper={sweeper}")
    kind = target_class(dict(config.hydra.launcher), "hydra/launcher")
    if not all(hasattr(kind, method) for method in ("machine", "launch_cells")):
        raise NotOursError(f"hydra/launcher={hydra.choice(config, 'launcher')}")
    launcher = hydra.launcher_of(config)
    composer = Composer(loader, config_name, of_hydra)
    typed = [text for text in parsed if text not in of_hydra]
    extra = ["--config-dir", str(config_dir)] if config_dir else []
    words = ["python", "-m", "vitsweep", *extra, "-m", *overrides]
    command = shlex.join(words) if command is None else command
    return session_of(typed, config, composer, launcher, console, command, machine)


def session_of(
    overrides: Sequence[str],
    config: Any,
    composer: Composer,
    launcher: Any,
    console: Console,
    command: str = "",
    machine: Machine | None = None,
) -> Session:
    """Compose, type and check the cells of a command whose configuration Hydra composed.

    Args:
        overrides: without those of Hydra's own node.
        config: composed by Hydra.
        composer: over the same configuration.
        launcher: that `config` chooses.
        console: see `open_session`; so are `command` and `machine`.

    Raises:
        BadValueError: an override is wrong.
        VitsweepError: the tracker cannot work here.
    """
    machine = machine or launcher.machine()
    cells, sweep, says = cells_for(overrides, composer, machine, console.print)
    session = Session(
        cells=cells,
        config=hydra.plain_resolved(config) | {"sweep": sweep},
        composer=composer,
        launcher=launcher,
        machine=machine,
        console=console,
        command=command,
    )
    require_rounds(launcher, hydra.choice(config, "launcher"), session.settings, overrides)
    for said in filter(None, (machine.quota_notice, says(session.plan))):
        console.print(said)
    return session


def require_rounds(
    launcher: Any, name: str, settings: SweepSettings, typed: Sequence[str] = ()
) -> None:
    """Refuse what chooses each block from the runs before to a launcher that submits all of them.

    Args:
        launcher: that is to measure the cells.
        name: as it is chosen.
        settings: of the sweep.
        typed: overrides; the threshold of slow cells is a default too, and only a typed one is refused.

    Raises:
        BadValueError: it would measure the whole grid.
    """
    slower = [w for w in typed if w.startswith("sweep.prune_slowdown=") and "null" not in w]
    chooses = {
        f"sweep.search={settings.search}": settings.search in extras.ROUNDS,
        f"sweep.minutes={settings.minutes or 0:g}": settings.minutes,
        f"sweep.limit.key={settings.limit.key}": settings.limit.key,
        "sweep.screening=true": settings.screening is True,
        **dict.fromkeys(slower, True),
    }
    refused = next((key for key, is_set in chooses.items() if is_set), "")
    if refused and not getattr(launcher, "can_choose_rounds", False):  # of vitsweep or of Hydra
        raise BadValueError(
            f"`{refused}` does not go with `hydra/launcher={name}`, which submits all blocks at once: use "
            "`hydra/launcher=local`, or inside a job `hydra/launcher=allocation`, as "
            "`sbatch slurm/sweep_in_one_job.sbatch` types it."
        )


def _name_what_there_is(overrides: Sequence[Any], loader: Any, config_name: str) -> None:
    """Refuse the first choice or key that does not exist, with those that do; Hydra's error names none.

    Raises:
        BadValueError: there is one.
    """
    texts = {str(o.input_line): o for o in overrides if "." not in o.key_or_group}
    for override in texts.values():
        group, choice = override.key_or_group, hydra.own_text(override)
        if (known := sorted(loader.get_group_options(group))) and choice not in known:
            raise unknown_choice(group, choice, known)
    tree = hydra.with_own_node(hydra.compose_sweep(loader, config_name, [*texts]))
    for override in overrides:
        if "." in override.key_or_group and is_plain_value(override):
            set_value(tree, override)


# Settings given in Python, written as the overrides that the command line takes.


Overrides = str | Sequence[str]
"""Overrides in Hydra's grammar: a list of them, or one text as typed in a shell."""


_EXPECTED = (
    "give texts such as 'precision=O1,O2', or settings by name, such as precision=['O1', 'O2']."
)


def as_overrides(overrides: Overrides, settings: Mapping[str, Any]) -> list[str]:
    """Return overrides as typed after `python -m vitsweep -m`.

    Args:
        overrides: in Hydra's grammar, such as `["precision=O1,O2"]`.
        settings: key -> value. A list, range or array sweeps the key, a mapping sets keys below it:
            `batch={"images_per_step": [32, 64]}` is `batch.images_per_step=32,64`.

    Raises:
        BadValueError: `overrides` is neither a text nor a list of texts, a list is empty, a value is none
            that a setting can have, or a key is given in both.
    """
    if not isinstance(overrides, Iterable) or isinstance(overrides, (Mapping, bytes)):
        raise BadValueError(f"`{overrides!r:.80}` is no list of overrides: {_EXPECTED}")
    texts = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    for text in texts:
        if not isinstance(text, str):
            raise BadValueError(f"`{text!r}` is no override: {_EXPECTED}")
    named = list(_of_settings(settings, ""))
    for text in named:
        refuse_second(texts, text)
    return [*map(without_units, texts), *named]


def refuse_second(texts: Sequence[str], added: str) -> None:
    """Refuse an override whose key some texts have as well: one of them would be dropped silently.

    Raises:
        BadValueError: both are named.
    """
    for text in texts:
        if text != added and key_of(text) == key_of(added):
            raise BadValueError(f"`{text}` and `{added}` set the same key: give one of them.")


def _of_settings(settings: Mapping[str, Any], above: str) -> Iterator[str]:
    for name, value in settings.items():
        key = f"{above}{name}"
        if above.endswith("arguments."):  # of a function: no YAML lists them
            key = f"++{key.removeprefix('++')}"
        if isinstance(value, Mapping):
            yield from _of_settings(value, f"{key}.")
        elif isinstance(plain := plain_value(key, value), list):
            if not plain:
                raise BadValueError(f"`{key}=[]` holds no value: give at least one.")
            yield sweep_override(key, plain)
        else:
            yield value_override(key, plain)
