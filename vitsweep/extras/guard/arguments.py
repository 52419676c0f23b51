"""Arguments of a wrong kind are refused when they are given, and not hours later at their first use."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitsweep.errors import BadValueError
from vitsweep.extras.take_home.apply import Applied
from vitsweep.model.module_look import shortened


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | None)


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "training": (lambda v: isinstance(v, Applied), "takes what `vitsweep.apply` returned"),
    "settings": (
        lambda v: isinstance(v, Sequence),
        'takes a grid such as `"precision=O1,O2"`, or a list of cells as `vitsweep.apply` takes them',
    ),
    "build_model": (
        lambda v: callable(v) and not isinstance(v, nn.Module),
        "takes a function that returns a new model, such as the class of yours, and no model",
    ),
    "every_steps": (_is_count, "is not the number of steps between checks: give 1 or more"),
    "tune_steps": (_is_count, "is no number of steps after which a search ends: give 1 or more"),
    "on_check": (callable, "takes a function of a result, such as `print`"),
    "on_news": (callable, "takes a function of a sentence, such as `print`"),
    "loss": (_is_function, "takes a function of outputs and batch, or None"),
    "loss_count": (_is_function, "takes a function of a batch, or None"),
    "record": (_is_path, "takes the path of a file, or None for none"),
    "config_dir": (_is_path, "takes the path of a folder, or None"),
    "raise_on_fault": (_is_switch, "must be True or False"),
    "trust": (_is_switch, "must be True or False"),
}
"""Argument -> whether a value is of its kind, and which that is."""


def require(**given: Any) -> None:
    """Refuse arguments that are not of the kind that `_RULES` has for their names.

    Raises:
        BadValueError: one is not.
    """
    for name, value in given.items():
        fits, rule = _RULES[name]
        if not fits(value):
            raise BadValueError(f"`{name}={shortened(repr(value))}` {rule}.")


def open_record(record: Any, rank: int) -> None:
    """Make the file on rank 0, where there is to be one.

    Raises:
        BadValueError: it cannot be written.
    """
    if record is not None and rank == 0:
        try:
            Path(record).open("a", encoding="utf-8").close()
        except OSError as error:
            raise BadValueError(
                f"`record={record}` cannot be written ({error.strerror}): name a file in a folder that there "
                "is, or give `record=None`."
            ) from error
