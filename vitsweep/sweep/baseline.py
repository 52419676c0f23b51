"""Baselines: what a speedup divides by, for every cell of a sweep."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vitsweep.errors import BadValueError
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.sweep import hydra_private
from vitsweep.sweep.asked import Asked
from vitsweep.sweep.assign import root_of
from vitsweep.sweep.compose import Composer
from vitsweep.sweep.grid import collapsed

ALWAYS_THE_CELLS_OWN = ("measurement", "seed")
"""A baseline is measured the same way as its cell, whatever `sweep.match` says."""


def with_baselines(
    cells: Sequence[Asked], composer: Composer
) -> tuple[list[Asked], list[int | None]]:
    """Return cells and the baselines they lack, and for each the place of its baseline.

    A cell that equals a baseline *is* it; a baseline is its own. Two cells that differ here may
    become one when every `auto` is resolved: their `cell_id` decides.

    Raises:
        BadValueError: `sweep.baseline` or `sweep.match` is wrong.
    """
    found = [baseline_of(cell, composer) for cell in cells]
    everything = collapsed([*cells, *(base for base in found if base)])
    place = {cell.key: index for index, cell in enumerate(everything)}
    baseline = {base.key: place[base.key] for base in found if base}
    baseline |= {c.key: place[b.key] for c, b in zip(cells, found, strict=True) if b}
    return everything, [baseline.get(cell.key) for cell in everything]


def baseline_of(cell: Asked, composer: Composer) -> Asked | None:
    """Return the baseline of a cell, or None with `sweep.baseline=null`.

    It has the cell's own overrides except those of the technique groups, of the mesh and of what
    `sweep.match` leaves out, which are back at their defaults; then come the choices of
    `sweep.baseline`.

    Raises:
        BadValueError: `sweep.baseline` or `sweep.match` is wrong.
    """
    sweep = cell.tree["sweep"]
    asked = _asked_choices(sweep.get("baseline"))
    if asked is None:
        return None
    match = _checked_match(sweep.get("match") or [], composer)
    reset = [g for g in composer.default_choices if g not in (*match, *ALWAYS_THE_CELLS_OWN)]
    own = [o for o in composer.parse(cell.overrides) if root_of(o) not in reset]
    texts = [str(o.input_line) for o in own] + _matched_values(cell, match, reset) + asked
    _refuse_sweeps(asked, composer)
    return _at_defaults(texts, asked, reset, composer)


def _at_defaults(
    texts: Sequence[str], asked: Sequence[str], reset: Iterable[str], composer: Composer
) -> Asked:
    """Compose a baseline; a group that something else keeps from its default is set to it."""
    baseline = composer.compose(texts)
    wanted = {group: composer.default_choices[group] for group in reset}
    wanted |= {o.key_or_group: o.value() for o in composer.parse(asked)}
    held = [g for g in reset if baseline.choices.get(g) != wanted[g]]
    return composer.compose([*texts, *(f"{g}={wanted[g]}" for g in held)]) if held else baseline


def _asked_choices(setting: Any) -> list[str] | None:
    """Return `sweep.baseline` as overrides; None stands for no baseline."""
    if setting is None:
        return None
    if isinstance(setting, Mapping):
        return [f"{key}={hydra_private.value_text(value)}" for key, value in setting.items()]
    if isinstance(setting, list):
        return [str(text) for text in setting]
    return [] if setting in ("default", "") else shlex.split(str(setting))


def _refuse_sweeps(asked: Sequence[str], composer: Composer) -> None:
    for override in composer.parse(asked):
        if override.is_sweep_override():
            raise BadValueError(
                f"`sweep.baseline`: `{override.input_line}` is several settings; a baseline is one."
            )


def _checked_match(match: Any, composer: Composer) -> list[str]:
    """Return the groups and keys of `sweep.match`."""
    known = [*composer.default_choices, "seed"]
    for name in match if isinstance(match, list) else [match]:
        if str(name).split(".")[0] not in known:
            listed = ", ".join(f"`{group}`" for group in known if group not in TECHNIQUE_GROUPS)
            raise BadValueError(
                f"`sweep.match` names `{name}`, which is no group; a baseline can share {listed} "
                "with its cell, or one key of them, as in `batch.resolution_px`."
            )
    return [str(name) for name in match]


def _matched_values(cell: Asked, match: Sequence[str], reset: Sequence[str]) -> list[str]:
    """Return the single keys of `sweep.match` whose group is reset, with the cell's values."""
    texts = []
    for name in match:
        group, _, key = name.partition(".")
        if key and group in reset and key in cell.tree[group]:
            texts.append(f"{name}={hydra_private.value_text(cell.tree[group][key])}")
    return texts
