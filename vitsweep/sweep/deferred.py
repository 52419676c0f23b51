"""What Hydra must not compose before the cells are known."""

from collections.abc import Sequence

from hydra.core.override_parser.types import Override, OverrideType

from vitsweep.sweep import hydra_private
from vitsweep.sweep.assign import root_of
from vitsweep.sweep.compose import Composer


def deferred(overrides: Sequence[str], composer: Composer) -> list[str]:
    """Write the overrides of cells as sweeps of one value, which Hydra leaves to the sweeper.

    Before a sweep Hydra composes one configuration from all that is not swept. It would refuse
    `precision=O1,O2 precision.loss_scale=128`, because the default precision has no such key, and
    its words for a mistyped group are not ours. What `sweep.*` and `hydra.*` say stays as typed.

    Raises:
        BadValueError: an override cannot be read.
    """
    return [_deferred(override) for override in composer.parse(overrides)]


def _deferred(override: Override) -> str:
    is_cells = root_of(override) != "sweep" and not override.is_hydra_override()
    sets = override.type in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)
    if not is_cells or not sets or override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}=choice({hydra_private.own_text(override)})"
