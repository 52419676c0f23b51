"""Between text and overrides: texts are parsed with Hydra's grammar, values are written as texts."""

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from vitsweep.composition import hydra
from vitsweep.composition.hydra import unknown_choice
from vitsweep.errors import BadValueError
from vitsweep.spec.menu import choices
from vitsweep.words import did_you_mean, gone

_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_][\w./-]*")
_READ_AS_OTHER_THAN_TEXT = ("null", "true", "false", "inf", "nan")


def parse_overrides(texts: Iterable[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides with Hydra's grammar, each text once per process.

    Args:
        texts: as typed.
        loader: lists the choices of a group where `glob(...)` asks for them; without one the values
            of such an override cannot be enumerated.

    Raises:
        BadValueError: a text is no override.
    """
    return [_parsed(text, loader) for text in texts]


@lru_cache(maxsize=100_000)
def _parsed(text: str, loader: ConfigLoader | None) -> Override:
    try:
        return hydra.parse(text, loader)
    except HydraException as error:
        raise BadValueError(_unreadable(text)) from error


def key_of(text: str) -> str:
    """Return the key or group that an override as typed sets."""
    return text.lstrip("+~").partition("=")[0]


def _unreadable(text: str) -> str:
    """Say what Hydra's grammar does not read in an override, and how to quote it."""
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return f"`{text}` is no override: type `key=value`, such as `precision=O1`."
    if value[:1] in ("[", "{"):
        return (
            f"`{text}` cannot be read: brackets must close, and a text in a list or section that holds "
            f"more than letters, digits and `.-_/` stands in quotes, such as `{key}=['a=b']`."
        )
    if ",," in text or text.endswith(","):
        return f"`{text}` cannot be read: a value is missing next to a comma."
    return (
        f"`{text}` cannot be read: a text that holds more than letters, digits and `.-_/` stands in "
        f'quotes, and in others for the shell: `"{value_override(key, value)}"`.'
    )


def value_override(key: str, value: Any) -> str:
    """Return the override that sets `key` to `value`: one value, never read as a sweep.

    Raises:
        BadValueError: no setting can have such a value.
    """
    return f"{key}={hydra.value_text(_quoted(plain_value(key, value)))}"


def sweep_override(key: str, values: list[Any]) -> str:
    """Return the override that sweeps `key` over `values`.

    Raises:
        BadValueError: no setting can have such a value.
    """
    plain = (_quoted(plain_value(key, value)) for value in values)
    return f"{key}=" + ",".join(map(hydra.value_text, plain))


def plain_value(key: str, value: Any) -> Any:
    """Return a value of Python's as Hydra's grammar has them: None, bool, number, text, list or dict.

    Numbers and arrays of numpy, pandas and torch, ranges and other iterables, and paths are converted.

    Args:
        key: of the setting, for the error.
        value: that a setting should have.

    Raises:
        BadValueError: it is none of these.
    """
    if hasattr(value, "tolist"):  # of numpy, pandas, torch: the number or list in Python's types
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {name: plain_value(key, part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [plain_value(key, part) for part in value]
    raise BadValueError(
        f"`{key}={value!r:.80}`: what is of type {type(value).__name__} is no value of a setting: give a "
        "number, a text, a path, True, False or None, or a list of these."
    )


def _quoted(value: Any) -> Any:
    """Quote the texts that Hydra's grammar would read as something else than a text."""
    if isinstance(value, dict):
        return {key: _quoted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quoted(part) for part in value]
    if not isinstance(value, str):
        return value
    if _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _READ_AS_OTHER_THAN_TEXT:
        return value
    return QuotedString(value, Quote.single)


# Overrides that nothing would read are refused, from the command line and from Python.


NOTED = (
    "hydra.job_logging", "hydra/job_logging", "hydra.hydra_logging", "hydra/hydra_logging",
    "hydra.output_subdir", "hydra.job.name",
)  # fmt: skip
"""Settings of Hydra's that wrappers of a site type, and that change neither results nor their place."""
ENVIRONMENT = ("hydra.job.env_set", "hydra.job.env_copy")
IGNORED = {
    ("hydra.run", "hydra.sweep", "hydra.job.chdir"): "results go to `sweep.folder`/`sweep.name`",
    ENVIRONMENT: "`'runtime.variables={NAME:value}'` sets environment variables of a cell",
    ("hydra.job", "hydra.runtime"): "a cell has processes of its own",
    (
        "hydra.verbose", "hydra.help", "hydra/help", "hydra.hydra_help", "hydra/hydra_help",
        "hydra.output", "hydra/output", "hydra.callbacks", "hydra/callbacks", "hydra.mode",
    ): "Hydra prints and calls nothing here",
}  # fmt: skip
"""Settings of Hydra's that vitsweep does not read, and why; the first that fits is said."""
OWN_SWEEPER = "hydra/sweeper=vitsweep"
STOCK_LAUNCHERS = ("hydra/launcher=basic", "hydra/launcher=joblib", "hydra/launcher=submitit")
"""Hydra's own launchers do set the variables of `ENVIRONMENT` for their jobs."""


def without_noted(overrides: Iterable[str]) -> list[str]:
    """Return the overrides without those of `NOTED`; each of these is a note."""
    kept = []
    for override in overrides:
        if _is_below(key_of(override), NOTED):
            print(f"Note: `{override}` changes nothing: vitsweep names, logs and keeps runs itself.",
                  file=sys.stderr)  # fmt: skip
        else:
            kept.append(override)
    return kept


def refuse_ignored(overrides: Sequence[str], has_own_conf: bool) -> None:
    """Refuse settings that nothing reads, and a named sweep that does not exist or is typed as a value.

    Raises:
        BadValueError: there is one; the text says what to type instead.
    """
    has_stock = any(o.startswith(STOCK_LAUNCHERS) for o in overrides)
    for override in overrides:
        key, _, name = override.lstrip("+").partition("=")
        if key == "sweep" and not (re.match(r"\+[^+]", override) and name.isidentifier()):
            show = "`python -m vitsweep show sweep` lists all"
            meant = did_you_mean(name, choices("sweep"), "+sweep={}".format, show)
            fault = "`sweep` is a section of settings, a named sweep has a `+`"
            raise BadValueError(f"`{override}`: {fault}{meant}")
        if key == "sweep" and has_own_conf and name not in (names := choices("sweep")):
            raise unknown_choice("+sweep", name, names)
        for sections, why in IGNORED.items():
            if _is_below(key.lstrip("~"), sections) and not (has_stock and sections == ENVIRONMENT):
                meant = did_you_mean(override, (), str)
                raise BadValueError(f"`{override}` changes nothing: {why}. Leave it out{meant}")
        if key == "hydra.launcher":
            raise BadValueError(f"`{override}` is a section; did you mean `hydra/launcher={name}`?")
        if key.startswith(("hydra/sweeper", "hydra.sweeper")) and override != OWN_SWEEPER:
            raise other_sweeper(override)
        _refuse_settings_of_what_is_not_chosen(override, key, overrides)


def other_sweeper(typed: str) -> BadValueError:
    """Say that vitsweep expands grids itself; `typed` chooses or sets another sweeper."""
    return BadValueError(
        f"`{typed}`: vitsweep has one sweeper, its own, without settings: leave it out{gone(typed) or '.'}"
    )


def _refuse_settings_of_what_is_not_chosen(
    override: str, key: str, overrides: Sequence[str]
) -> None:
    """Refuse a setting of a launcher that the command does not choose."""
    _, launcher, setting = key.lstrip("~").partition("hydra.launcher.")
    if not launcher or any(text.lstrip("+").startswith("hydra/launcher") for text in overrides):
        return
    raise BadValueError(
        f"`{override}`: the launcher of this machine has no settings. Those of a cluster need "
        f"`hydra/launcher=slurm` beside them{gone(f'hydra.launcher.{setting}') or '.'}"
    )


def _is_below(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
