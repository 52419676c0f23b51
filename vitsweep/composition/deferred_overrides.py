"""Overrides of cells are hidden from Hydra until the grid is expanded."""

from collections.abc import Sequence

from hydra.core.override_parser.types import Override, OverrideType

from vitsweep.composition import hydra
from vitsweep.composition.composer import OUTSIDE_THE_CELL, root_of
from vitsweep.composition.overrides import parse_overrides

_SHOW_ONE = ("-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "-r", "--run")
"""Flags of Hydra under which there is one configuration and no sweep."""


def deferred(arguments: Sequence[str]) -> list[str]:
    """Write the overrides of cells as sweeps of one value, which Hydra leaves to the sweeper.

    Before a sweep Hydra composes one configuration from all that is not swept. It would refuse
    `precision=O1,O2 precision.loss_scale=128`, because the default precision has no such key, and
    its error for a mistyped group names no alternatives. What `sweep.*` and `hydra.*` say stays as typed,
    and so does everything where another sweeper was chosen or nothing is swept.

    Args:
        arguments: the command line, flags of Hydra among it.

    Raises:
        BadValueError: an override cannot be read.
    """
    names = {argument.partition("=")[0] for argument in arguments}
    if names & {*_SHOW_ONE, "hydra/sweeper"}:
        return list(arguments)
    return [_deferred(text) if _is_override(text) else text for text in arguments]


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def _deferred(text: str) -> str:
    [override] = parse_overrides([text])
    if belongs_to_the_sweep(override) or override.is_sweep_override():
        return text
    key, value = override.get_key_element(), hydra.own_text(override) or "''"
    if override.value() is None:
        return f"{key}={value},{value}"  # Hydra refuses `choice(null)`; equal cells are one
    return f"{key}=choice({value})"


def belongs_to_the_sweep(override: Override) -> bool:
    """Tell whether an override says what the sweep is or sets Hydra's own node, not a cell's."""
    sets = override.type in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)
    return not sets or root_of(override) in OUTSIDE_THE_CELL or bool(override.is_hydra_override())
