"""What is typed without a verb: overrides, handed to Hydra."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from traceback import walk_tb
from typing import Any

from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from vitsweep.api.functions import Row, measured, require_racing, search_limits, searches_of
from vitsweep.api.session import Session
from vitsweep.cli.verbs import VERBS
from vitsweep.composition import hydra
from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, ExitCode, VitsweepError
from vitsweep.launchers.base import CellLauncher, LaunchResult, locked
from vitsweep.launchers.dispatch import composer_of, launch_stock, refuse_plan_of
from vitsweep.planning.freeze import plan_of, store_of
from vitsweep.planning.limit_search import Search, Searches
from vitsweep.results.store import sweep_argument
from vitsweep.spec.resources import Machine

COMPLETION = ("-sc", "--shell-completion")
HYDRA_SHOWS = (*COMPLETION, "-c", "--cfg", "-i", "--info", "--hydra-help")
"""Flags that make Hydra print something instead of running."""


def run_hydra(arguments: Sequence[str]) -> int:
    """Compose and launch through Hydra; a single cell is a sweep of one.

    Raises:
        VitsweepError: Python runs without assertions, or what was typed is wrong.
        SystemExit: with the exit code of what ran, if it is not 0.
    """
    if sys.flags.optimize:
        raise VitsweepError(
            "`python -O` and PYTHONOPTIMIZE leave out the assertions with which Hydra reads a command "
            "line: use `python -m vitsweep` without them."
        )
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    import vitsweep.planning.freeze  # noqa: F401  (keeps sys.argv as typed)
    from vitsweep.composition.conf_dir import conf_dir
    from vitsweep.composition.suggestions import hydra_error_sentence

    sys.argv = ["vitsweep", *_for_hydra(arguments)]  # the name in Hydra's usage and in its scripts

    def task(config: object) -> None:
        """Only stock launchers of Hydra call it."""
        from vitsweep.launchers.external_ranks import run_composed

        run_composed()

    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise: it would print a hint and exit with 1
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise BadValueError(
            hydra_error_sentence("The command cannot be composed", error)
        ) from error
    except (ValueError, NotImplementedError) as error:
        if not is_of_optuna(error):
            raise
        if str(error) != NO_TRIAL:
            raise BadValueError(f"`{CHOICE}`: {error}") from error
        print("No trial of the search was measured: the tables say why.", file=sys.stderr)
        return ExitCode.not_all_measured
    except SystemExit as left:
        if left.code == 1:  # Hydra's code of what it refuses by itself, such as `--package nosuch`
            raise SystemExit(ExitCode.bad_input) from left
        raise
    return ExitCode.ok


def _for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with what belongs to cells left to our sweeper.

    Raises:
        VitsweepError: several cells are asked for without `-m`, a word is no override, or the
            sweeper's package is not installed.
    """
    from vitsweep.composition.deferred_overrides import deferred
    from vitsweep.composition.overrides import parse_overrides, refuse_ignored

    arguments = with_optuna_defaults(arguments)
    if any(a.split("=")[0] in HYDRA_SHOWS for a in arguments):
        return list(arguments)
    _refuse_words(arguments)
    overrides = [a for a in arguments if _is_override(a)]
    adds_conf = any(a.startswith(("--config-", "hydra.searchpath")) for a in arguments)
    refuse_ignored(overrides, has_own_conf=not adds_conf)
    parsed = parse_overrides(overrides)
    if not {"-m", "--multirun"} & set(arguments):
        _refuse_sweeps(parsed, arguments)
    for notice in _repeated_keys(parsed):
        print(notice, file=sys.stderr)
    flags = [a for a in arguments if a not in overrides and a not in ("-m", "--multirun")]
    return ["--multirun", *flags, *deferred(overrides)]


def _repeated_keys(overrides: Sequence[Any]) -> Iterator[str]:
    """Yield a notice for each key that was typed several times: only the last of them counts."""
    typed: dict[str, list[str]] = {}
    for override in overrides:
        typed.setdefault(override.get_key_element().lstrip("+~"), []).append(override.input_line)
    for key, texts in typed.items():
        if len(texts) > 1:
            named = ", ".join(f"`{text}`" for text in texts)
            values = ",".join(text.partition("=")[2] for text in texts)
            yield (
                f"`{key}` is given {len(texts)} times ({named}): the last one counts. A sweep over all "
                f"of them is `-m {key}={values}`."
            )


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def _refuse_words(arguments: Sequence[str]) -> None:
    """Refuse what is neither a verb nor an override; the word after a flag is that flag's."""
    from vitsweep.errors import did_you_mean

    for before, word in pairwise(["-m", *arguments]):
        of_flag = before.startswith("-") and before not in ("-m", "--multirun")
        if of_flag or word.startswith("-") or _is_override(word):
            continue
        if before.endswith(","):
            raise VitsweepError(f"`{before} {word}`: no space after a comma: `{before}{word}`.")
        if word in VERBS:
            rest = " ".join(a for a in arguments if a != word)
            raise VitsweepError(f"The verb comes first: `python -m vitsweep {word} {rest}`.")
        known = ", ".join(f"`{verb}`" for verb in VERBS)
        raise VitsweepError(
            f"`{word}` is neither an override (`key=value`) nor a verb; the verbs are {known} and "
            "come first." + did_you_mean(word, VERBS, lambda verb: f"python -m vitsweep {verb}")
        )


def _refuse_sweeps(overrides: Sequence[Any], arguments: Sequence[str]) -> None:
    """Without -m a comma would silently make a list or a text of what was meant as a sweep."""
    for override in overrides:
        if override.is_sweep_override():
            raise VitsweepError(
                f"`{override.input_line}` asks for several cells: add `-m` "
                f"(`python -m vitsweep -m {' '.join(arguments)}`)."
            )


def asks_for_completion(arguments: Sequence[str]) -> bool:
    """Tell whether the Tab key asks, through a script that Hydra wrote."""
    return bool(set(COMPLETION) & set(arguments)) and any("query=" in a for a in arguments)


# A sweep, from the overrides that Hydra parsed to the tables that the user sees.


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
    settings = hydra.plain_resolved(config)
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
    from vitsweep.cli.cells import exit_code

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
    plain = hydra.plain_resolved(config) if isinstance(config, DictConfig) else config
    return Session(
        cells=cells, config=plain, composer=composer, launcher=launcher, console=open_console()
    )


def run_cells(session: Session) -> list[Row]:
    """Measure what is missing of the cells and show it; return the row of each, in their order.

    Raises:
        SweepStopped: the user stopped it.
    """
    from vitsweep.cli.cells import summarize  # pandas and charts, which a plan does not need

    with measured(session) as result:
        return summarize(
            result, session.console, session.tracker, with_report=session.settings.report
        )


def _summarize_stock(
    cells: Sequence[ComposedCell], config: Mapping[str, Any], composer: Composer
) -> None:
    """Show what a stock launcher ran, or say how to see it where the cells ran on other nodes."""
    from vitsweep.cli.cells import exit_code, summarize

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
    from vitsweep.api.plan import CURRENT, plan

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
    from vitsweep.cli.cells import summarize_limits

    found = search_limits(session, searches)
    settings = session.settings
    summarize_limits(store_of(settings), searches.key, session.console, with_report=settings.report)
    if any(search.failure for search in found):
        raise SystemExit(ExitCode.not_all_measured)
    return found


# `hydra/sweeper=optuna`: the sweeper of hydra-optuna-sweeper, set up to maximize throughput.


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
