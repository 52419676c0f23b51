"""The grid: from a command line to its cells. Grammar as in Hydra, expansion by vitsweep."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from vitsweep.composition.axes import Axis, axes_of, cells_axis, named_axes, zipped
from vitsweep.composition.composed_cell import ComposedCell, Tree
from vitsweep.composition.composer import Composer
from vitsweep.composition.override_text import value_override
from vitsweep.composition.sweep_name import named
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError


def expand(overrides: Sequence[str], composer: Composer | None = None) -> list[ComposedCell]:
    """Return the cells of a command line, each once, in the order of Hydra's own sweeper.

    Swept overrides multiply; the `axes` and `cells` of a named sweep (`+sweep=NAME`) multiply with
    them; axes named together in `sweep.zip` advance together. An override on the command line
    replaces one of the same key in the named sweep, and one in `cells` that of an axis.

    Args:
        overrides: as typed after `python -m vitsweep -m`; those of Hydra's own node are left out.
        composer: shares what is composed between calls.

    Raises:
        BadValueError: an override is wrong; the text names it as typed and the valid ones.
    """
    composer = composer or Composer()
    typed_axes = axes_of(composer, overrides)
    tree = composer.compose(_sweep_overrides(typed_axes)).tree
    settings = sweep_settings(tree)
    axes = {axis.key: axis for axis in named_axes(composer, settings.axes)}
    axes |= {axis.key: axis for axis in typed_axes if axis.root != "sweep"}
    factors = zipped(list(axes.values()), settings.zip)
    cells = cells_axis(composer, settings.cells).values if settings.cells else [()]
    typed_keys = {axis.key for axis in typed_axes}
    common = _settings_of_all_cells(tree["sweep"], composer)
    products = product(cells, *(axis.values for axis in factors))
    lists = [
        merge_overrides(
            [cell, *parts, _without_typed_keys(cell, typed_keys, composer), common], composer
        )
        for cell, *parts in products
    ]
    return named(without_duplicates(map(composer.compose, lists)), composer)


def without_duplicates(cells: Iterable[ComposedCell]) -> list[ComposedCell]:
    """Leave out cells whose configuration is that of an earlier one."""
    first: dict[str, ComposedCell] = {}
    for cell in cells:
        first.setdefault(cell.key, cell)
    return list(first.values())


def _sweep_overrides(axes: Sequence[Axis]) -> list[str]:
    """Return the overrides that say what the sweep is, which therefore cannot be swept."""
    own = [axis for axis in axes if axis.root == "sweep"]
    for axis in own:
        if len(axis.values) > 1:
            raise BadValueError(
                f"`{axis.key}` cannot be swept: it says what the sweep is, one for all cells."
            )
    return [text for axis in own for text in axis.values[0]]


def _without_typed_keys(
    cell: tuple[str, ...], typed_keys: set[str], composer: Composer
) -> tuple[str, ...]:
    """Return the overrides of a `cells` entry whose keys were not typed; these replace axes."""
    keyed = zip(composer.parse(cell), cell, strict=True)
    return tuple(text for override, text in keyed if override.get_key_element() not in typed_keys)


def _settings_of_all_cells(sweep: Tree, composer: Composer) -> tuple[str, ...]:
    """Return the `sweep.*` overrides of every cell: all settings but those that made the grid."""
    default = composer.compose().tree["sweep"]
    kept = {k: v for k, v in sweep.items() if k not in ("axes", "cells", "zip")}
    return tuple(value_override(f"sweep.{k}", v) for k, v in kept.items() if v != default.get(k))


def merge_overrides(parts: Iterable[tuple[str, ...]], composer: Composer) -> list[str]:
    """Join the overrides of one cell; of two with the same key the later one counts."""
    texts = [text for part in parts for text in part]
    keyed: dict[str, Any] = {}
    for override, text in zip(composer.parse(texts), texts, strict=True):
        keyed[override.get_key_element()] = text
    return list(keyed.values())
