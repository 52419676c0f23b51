"""What is typed without a verb: overrides, handed to Hydra."""

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from vitsweep.cli.verbs import VERBS
from vitsweep.errors import BadValueError, ExitCode, VitsweepError

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

    import vitsweep.planning.provenance  # noqa: F401  (keeps sys.argv as typed)
    from vitsweep.cli.optuna_search import CHOICE, NO_TRIAL, is_of_optuna
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
    from vitsweep.cli.optuna_search import with_optuna_defaults
    from vitsweep.composition.deferred_overrides import deferred
    from vitsweep.composition.override_text import parse_overrides
    from vitsweep.composition.refused_overrides import refuse_ignored

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
    from vitsweep.composition.suggestions import did_you_mean

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
