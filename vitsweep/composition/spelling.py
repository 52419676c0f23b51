"""What is a text arrives as it is spelled: YAML makes 43200 of 12:00:00, and Hydra 20241127 of 2024_11_27."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from vitsweep.errors import BadValueError

LAUNCHERS = "hydra/launcher/"
"""Where the files of launchers lie."""
_LAUNCHER = "hydra.launcher."
_OPTIONS = "additional_parameters"
"""The setting of a launcher that holds options of sbatch, which are texts whatever they look like."""
TEXTS = frozenset((
    "data.folder", "data.label", "data.target", "loader.folder", "model.blocks", "model.loss",
    "model.loss_count", "model.name", "model.package", "model.target", "model.twin_batch", "model.version",
    "sweep.folder", "sweep.name", "sweep.question", "sweep.reference", "task.held_out", "task.resume_from",
    "tracker.project",
))  # fmt: skip
"""Settings that are texts, whatever they look like; further ones of own techniques are typed in quotes."""
_BARE = re.compile(r"(?:choice\()?([^][{}()'\"\\]+)\)?")
"""The words of a sweep that holds nothing but words."""
_NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d+)?")


class _Spelled(yaml.SafeLoader):
    """Reads every scalar as its text."""


for _kind in ("bool", "int", "float", "null", "timestamp"):
    _Spelled.add_constructor(f"tag:yaml.org,2002:{_kind}", _Spelled.construct_yaml_str)  # type: ignore[type-var]


def require_spelling(config_path: str, read: Mapping[str, Any], text: str) -> None:
    """Refuse a file that sets options or numbers of a launcher which do not arrive as they are spelled.

    Args:
        config_path: of the file, such as `hydra/launcher/slurm`.
        read: its content.
        text: of the file.

    Raises:
        BadValueError: YAML makes something else of one.
    """
    trees: list[Any] = [read, yaml.load(text, _Spelled)]
    if not config_path.startswith(LAUNCHERS):
        trees = [(tree.get("hydra") or {}).get("launcher") for tree in trees]
    problems = [
        f"`{config_path}`: `{key}: {typed}` is read by YAML as `{_in_yaml(value)}`. Write "
        f"{_instead(key, value, typed)}."
        for key, value, typed in _changed("", *trees)
    ]
    if problems:
        raise BadValueError("\n".join(problems))


def _changed(key: str, read: Any, spelled: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and text of what is not what it is spelled as."""
    if isinstance(read, dict) and isinstance(spelled, dict):
        for name in read.keys() & spelled.keys():
            yield from _changed(f"{key}.{name}".lstrip("."), read[name], spelled[name])
    elif isinstance(read, list) and isinstance(spelled, list):
        for value, typed in zip(read, spelled, strict=False):
            yield from _changed(key, value, typed)
    elif not _is_plain(key, read, spelled):
        yield key, read, spelled


def _is_plain(key: str, value: Any, typed: str) -> bool:
    """Whether a number or a boolean is what its text says."""
    if not isinstance(value, bool | int | float):
        return True
    if key.startswith(_OPTIONS):
        return _in_yaml(value) == (typed.lower() if isinstance(value, bool) else typed)
    return isinstance(value, bool) or _NUMBER.fullmatch(typed) is not None


def _in_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _instead(key: str, value: Any, typed: str) -> str:
    name = key.rpartition(".")[2]
    if key == f"{_OPTIONS}.time":
        return "`timeout_min: MINUTES` for the time limit of a job"
    if isinstance(value, bool):
        return f"`{name}: '{typed}'`, or `{name}: {_in_yaml(value)}` for an option without a value"
    return (
        f"{'' if key.startswith(_OPTIONS) else 'a plain number, or of a text '}`{name}: '{typed}'`"
    )


def as_spelled(key: str, word: str, value: Any) -> str | None:
    """Return the typed word of a setting that is a text, where Hydra reads something else; else None.

    Args:
        key: of the setting.
        word: what was typed for it.
        value: what Hydra makes of it.

    Raises:
        BadValueError: a list or section of a launcher's setting holds such a word.
    """
    name = key.removeprefix(_LAUNCHER)
    if key in TEXTS and isinstance(value, bool | int | float):
        return word
    if name == key:
        return None
    if not isinstance(value, list | dict):
        return None if _is_plain(name, value, word) else word
    typed = {*re.split(r"[][{}:,\s]+", word)}
    for part in _scalars(value):
        if not isinstance(part, bool | str | None) and str(part) not in typed:
            raise BadValueError(
                f"`{key}={word}`: a word in it is read as the number {part}, and would not arrive as it is "
                f"typed: write it in quotes, such as `{name}={{comment:'{part}'}}`."
            )
    return None


def swept_as_spelled(key: str, word: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of a swept setting; where it is a text, the typed words instead of numbers."""
    bare = _BARE.fullmatch(word) if key in TEXTS else None
    words = [each.strip() for each in bare[1].split(",")] if bare else []
    if len(words) != len(values):
        return [*values]
    return [as_spelled(key, w, v) or v for w, v in zip(words, values, strict=True)]


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _scalars(part)
    else:
        yield value
