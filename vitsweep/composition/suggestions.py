"""Error messages for unknown groups, choices and keys: as typed, the valid ones, the closest one."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from hydra.core.override_parser.types import Override

from vitsweep.errors import BadValueError, did_you_mean


def unknown_choice(group: str, choice: str, valid: Iterable[str]) -> BadValueError:
    """Say which choices a group has."""
    names = list(valid)
    return BadValueError(
        f"`{group}={choice}`: `{group}` has no choice `{choice}`."
        + did_you_mean(choice, names, lambda name: f"{group}={name}")
        + f" It has {_listed(names)}."
    )


def unknown_key(
    override: Override, path: Sequence[str], key: str, node: Mapping[str, Any], choice: str = ""
) -> BadValueError:
    """Say which keys stand where `key` was looked for.

    Args:
        override: as typed.
        path: keys down to `node`, a group or a section of the configuration; empty for its root.
        key: what `node` lacks.
        node: part of the configuration.
        choice: which choice of its group filled `node`; "" where it is no group.
    """
    typed, names = str(override.input_line), [name for name in node if not name.startswith("_")]
    where = ".".join(path)
    of_sweep = node.get("sweep") if not path else None
    if isinstance(of_sweep, Mapping) and key in of_sweep:
        return BadValueError(
            f"`{typed}`: `{key}` stands in the section `sweep`: use `sweep.{typed.lstrip('+')}`."
        )
    if not names:
        return BadValueError(
            f"`{typed}`: `{where}{f'={choice}' if choice else ''}` has no key `{key}`, nor any other: "
            f"give `{key}` to a choice of `{where}` that has it, in a command of its own where several "
            "choices are swept."
        )
    where = f"{where}={choice}" if choice else where
    fault = f"`{where}` has no key `{key}`" if where else f"there is no group or key `{key}`"
    _, _, value = typed.partition("=")
    rest = override.key_or_group.split(".")[len(path) + 1 :]
    return BadValueError(
        f"`{typed}`: {fault}."
        + did_you_mean(key, names, lambda name: ".".join([*path, name, *rest]) + f"={value}")
        + f" There are {_listed(names)}."
    )


def hydra_error_sentence(what: str, error: BaseException) -> str:
    """Return Hydra's reason on one line, without its links and its hints for developers."""
    lines = [line.strip() for line in str(error or error.__cause__).splitlines()]
    kept = [line for line in lines if line and "https://" not in line and "HYDRA_FULL" not in line]
    return f"{what}: {' '.join(takewhile(lambda line: 'onfig search path:' not in line, kept))}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
