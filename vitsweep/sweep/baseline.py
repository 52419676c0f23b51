"""Baselines: what a speedup divides by, for every cell of a sweep."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitsweep.errors import BadValueError
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.sweep.asked import Asked
from vitsweep.sweep.assign import root_of
from vitsweep.sweep.compose import Composer
from vitsweep.sweep.typed import typed

ALWAYS_THE_CELLS_OWN = ("measurement", "seed")
"""A baseline is measured the same way as its cell, whatever `sweep.match` says."""


def baseline_rule(sweep: Mapping[str, Any]) -> Callable[[Asked], Asked | None]:
    """Return what gives each cell its baseline.

    A baseline has the cell's own overrides except those of the technique groups, of the mesh and
    of what `sweep.match` leaves out, which are back at their defaults; then come the choices of
    `sweep.baseline`. With `sweep.baseline=null` there is none.

    Args:
        sweep: node of that name of the composed configuration.

    Raises:
        BadValueError: `sweep.match` is no list; the rule raises it where a name or choice is wrong.
    """
    asked = _as_overrides(sweep.get("baseline"))
    match = sweep.get("match")
    if not isinstance(match, list):
        raise BadValueError(f"`sweep.match={match}` must be a list of groups, like `[model,data]`.")
    if asked is None:
        return lambda cell: None
    return _Rule(asked, tuple(str(name) for name in match))


@dataclass(frozen=True)
class _Rule:
    asked: Sequence[str]
    match: Sequence[str]

    def __call__(self, cell: Asked) -> Asked:
        composer = cell.origin or Composer()
        self._check(composer)
        kept = (*self.match, *ALWAYS_THE_CELLS_OWN)
        reset = [group for group in composer.default_choices if group not in kept]
        own = [o for o in composer.parse(cell.overrides) if root_of(o) not in reset]
        texts = [*(str(o.input_line) for o in own), *self._matched_keys(cell, reset), *self.asked]
        return self._at_defaults(texts, reset, composer)

    def _check(self, composer: Composer) -> None:
        for override in composer.parse(self.asked):
            if override.is_sweep_override():
                raise BadValueError(
                    f"`sweep.baseline`: `{override.input_line}` is several settings; "
                    "a baseline is one."
                )
        known = [*composer.default_choices, "seed"]
        for name in self.match:
            if name.split(".")[0] not in known:
                listed = ", ".join(f"`{g}`" for g in known if g not in TECHNIQUE_GROUPS)
                raise BadValueError(
                    f"`sweep.match` names `{name}`, which is no group. A baseline can share "
                    f"{listed} with its cell, or one key of them, as in `batch.resolution_px`."
                )

    def _matched_keys(self, cell: Asked, reset: Sequence[str]) -> list[str]:
        """Return the single keys in `sweep.match` whose group is reset, with the cell's values."""
        pairs = [(name, *name.partition(".")[::2]) for name in self.match if "." in name]
        return [
            typed(name, cell.tree[group][key])
            for name, group, key in pairs
            if group in reset and key in cell.tree[group]
        ]

    def _at_defaults(self, texts: list[str], reset: Sequence[str], composer: Composer) -> Asked:
        """Compose; a group that something else keeps from its default is set to it by name."""
        baseline = composer.compose(texts)
        wanted = {group: composer.default_choices[group] for group in reset}
        wanted |= {o.key_or_group: str(o.value()) for o in composer.parse(self.asked)}
        held = [group for group in reset if baseline.choices.get(group) != wanted[group]]
        return composer.compose([*texts, *(f"{g}={wanted[g]}" for g in held)]) if held else baseline


def _as_overrides(setting: Any) -> list[str] | None:
    """Return `sweep.baseline` as overrides; None stands for no baseline."""
    if setting is None:
        return None
    if isinstance(setting, Mapping):
        return [typed(str(key), value) for key, value in setting.items()]
    if isinstance(setting, list):
        return [str(text) for text in setting]
    return [] if setting in ("default", "") else shlex.split(str(setting))
