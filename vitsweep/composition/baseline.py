"""Baselines: what a speedup divides by, for every cell of a sweep."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from vitsweep.composition.composer import ComposedCell, Composer, root_of
from vitsweep.composition.overrides import value_override
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import GROUPS

ALWAYS_THE_CELLS_OWN = ("measurement", "recipe", "seed")
"""A baseline is measured and trained the same way as its cell, whatever `sweep.match` says."""


def baseline_of(cell: ComposedCell, composer: Composer) -> ComposedCell | None:
    """Return the baseline of a cell, or None with `sweep.baseline=null`.

    It has the cell's own overrides except those of the technique groups, of the mesh and of what
    `sweep.match` leaves out, which are back at their defaults; then come the choices of
    `sweep.baseline`. Its `auto` values are not resolved yet, so that only the `cell_id` can tell
    whether a cell is its own baseline.

    Raises:
        BadValueError: `sweep.baseline` or `sweep.match` is wrong.
    """
    settings = sweep_settings(cell.tree)
    choices = _as_overrides(settings.baseline)
    if choices is None:
        return None
    match = _checked_match(settings.match, composer)
    kept = (*match, *ALWAYS_THE_CELLS_OWN)
    reset = [group for group in composer.default_choices if group not in kept]
    own = [str(o.input_line) for o in composer.parse(cell.overrides) if root_of(o) not in reset]
    wanted = {group: composer.default_choices[group] for group in reset}
    try:
        wanted |= _group_choices(choices, composer)
        kept_keys = _matched_keys(cell, match, reset)
        return _with_choices([*own, *kept_keys, *choices], wanted, composer)
    except BadValueError as error:
        if not choices or "sweep.baseline" in str(error):
            raise
        raise BadValueError(
            f"`{_typed(settings.baseline)}`: {error} It takes choices instead of the plain "
            "ones, such as `'sweep.baseline={precision:O1,sharding:fsdp}'`, or null."
        ) from error


def _with_choices(texts: list[str], wanted: Mapping[str, str], composer: Composer) -> ComposedCell:
    """Compose; where another override changed a group, its wanted choice is added by name."""
    baseline = composer.compose(texts)
    other = [f"{g}={choice}" for g, choice in wanted.items() if baseline.choices.get(g) != choice]
    return composer.compose([*texts, *other]) if other else baseline


def _group_choices(texts: Sequence[str], composer: Composer) -> dict[str, str]:
    """Return the groups among the overrides of `sweep.baseline`."""
    for override in composer.parse(texts):
        if override.is_sweep_override():
            raise BadValueError(
                f"`sweep.baseline`: `{override.input_line}` is several settings; a baseline is one."
            )
    groups = [o for o in composer.parse(texts) if o.key_or_group in composer.default_choices]
    return {override.key_or_group: str(override.value()) for override in groups}


def _checked_match(match: Sequence[str], composer: Composer) -> Sequence[str]:
    """Return the groups and keys of `sweep.match`.

    Raises:
        BadValueError: one of them is no group.
    """
    known = [*composer.default_choices, "seed"]
    for name in match:
        if name.split(".")[0] not in known:
            listed = ", ".join(f"`{group}`" for group in known if group not in GROUPS)
            raise BadValueError(
                f"`sweep.match` names `{name}`, which is no group. A baseline can share {listed} "
                "with its cell, or one key of them, as in `batch.resolution_px`."
            )
    return match


def _matched_keys(cell: ComposedCell, match: Sequence[str], reset: Sequence[str]) -> list[str]:
    """Return the single keys in `sweep.match` whose group is reset, with the cell's values."""
    pairs = [(name, *name.partition(".")[::2]) for name in match if "." in name]
    return [
        value_override(name, cell.tree[group][key])
        for name, group, key in pairs
        if group in reset and key in cell.tree[group]
    ]


def _typed(setting: Any) -> str:
    """Return `sweep.baseline` as one types it."""
    plain = list(setting) if isinstance(setting, tuple) else setting
    return value_override("sweep.baseline", plain)


def _as_overrides(setting: Any) -> list[str] | None:
    """Return `sweep.baseline` as overrides; None stands for no baseline."""
    if setting is None:
        return None
    if isinstance(setting, Mapping):
        return [value_override(str(key), value) for key, value in setting.items()]
    if isinstance(setting, tuple):
        return [str(text) for text in setting]
    return [] if setting in ("default", "") else shlex.split(str(setting))
