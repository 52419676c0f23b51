"""The grid: from a command line to its cells. Grammar as in Hydra, expansion by vitsweep."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.types import Override

from vitsweep.composition import hydra
from vitsweep.composition.composer import ComposedCell, Composer, Tree, root_of
from vitsweep.composition.overrides import sweep_override, value_override
from vitsweep.composition.sweep_name import named
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError

# Axes of a grid: a key with the overrides it takes in turn.


@dataclass(frozen=True)
class Axis:
    """One factor of the grid.

    Attributes:
        key: as typed, with `+`, `++` or `~`.
        values: for each step along the axis, the overrides it stands for.
        root: top-level key of the configuration that it touches; empty where there are several.
    """

    key: str
    values: Sequence[tuple[str, ...]]
    root: str = ""

    @property
    def name(self) -> str:
        """The key without its sign, as `sweep.zip` names it."""
        return self.key.lstrip("+~")


def axes_of(composer: Composer, overrides: Sequence[str]) -> list[Axis]:
    """Return an axis for each override; one that is not swept has one value.

    Of two overrides with the same key the later counts, at the place of the first, as in Hydra.

    Raises:
        BadValueError: an override cannot be read, cannot be enumerated, or has no value.
    """
    axes: dict[str, Axis] = {}
    for override in composer.parse(overrides):
        if not _is_hydras_own(override):
            axis = _axis(override, composer)
            axes[axis.key] = axis
    return list(axes.values())


def named_axes(composer: Composer, axes: Mapping[str, Any]) -> list[Axis]:
    """Return the axes of a named sweep: key -> list of values, or a sweep in Hydra's grammar."""
    texts = []
    for key, value in axes.items():
        values = value if isinstance(value, list) else None
        if values == []:
            raise BadValueError(f"`sweep.axes`: `{key}` has no value.")
        texts.append(sweep_override(key, values) if values else f"{key}={value}")
    return axes_of(composer, texts)


def cells_axis(composer: Composer, cells: Sequence[Any]) -> Axis:
    """Return the axis of `sweep.cells`: each entry a list of overrides, or one text of them."""
    values: list[tuple[str, ...]] = []
    for entry in cells:
        texts = shlex.split(entry) if isinstance(entry, str) else [str(text) for text in entry]
        factors = [axis.values for axis in axes_of(composer, texts)]
        values += [tuple(t for part in parts for t in part) for parts in product(*factors)]
    return Axis("sweep.cells", values)


def zipped(axes: Sequence[Axis], groups: Sequence[Sequence[str]]) -> list[Axis]:
    """Return axes where those named together in `sweep.zip` became one.

    Raises:
        BadValueError: a name is not swept, stands twice, or lengths differ.
    """
    result = list(axes)
    for names in groups:
        members = [_member(result, name, names) for name in names]
        lengths = {axis.name: len(axis.values) for axis in members}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"`{name}` has {length} values" for name, length in lengths.items())
            raise BadValueError(f"`sweep.zip` pairs axes of one length; {listed}.")
        steps = zip(*(axis.values for axis in members), strict=True)
        joined = Axis(" + ".join(lengths), [tuple(t for v in step for t in v) for step in steps])
        result[result.index(members[0])] = joined
        result = [axis for axis in result if axis not in members]
    return result


def _member(axes: Sequence[Axis], name: str, names: Sequence[str]) -> Axis:
    found = [axis for axis in axes if axis.name == name and len(axis.values) > 1]
    if not found or names.count(name) > 1:
        swept = ", ".join(f"`{axis.name}`" for axis in axes if len(axis.values) > 1) or "none"
        raise BadValueError(
            f"`sweep.zip` names `{name}`, which must be one swept key, once; swept are {swept}."
        )
    return found[0]


def _axis(override: Override, composer: Composer) -> Axis:
    text, key = override.input_line, override.get_key_element()
    if override.is_interval_sweep():
        raise BadValueError(
            f"`{text}`: an interval has no list of values. Use `range(...)` or `choice(...)`, or "
            "let an optimizing sweeper draw from it: `hydra/sweeper=optuna`."
        )
    try:
        values = [(each,) for each in hydra.axis_texts(override)]
        if set(values) == {(f"{key}=null",)}:
            values = values[
                :1
            ]  # `cli.hydra_detour` names it twice, since Hydra refuses `choice(null)`
    except ValueError as error:  # of Python's `range`
        raise BadValueError(f"`{text}` cannot be enumerated: {error}.") from error
    if not values:
        group = override.key_or_group
        has = f"; `{group}` has {', '.join(f'`{o}`' for o in composer.options(group))}"
        raise BadValueError(
            f"`{text}` holds no value{has if group in composer.default_choices else ''}."
        )
    return Axis(key, values, root_of(override))


def _is_hydras_own(override: Override) -> bool:
    """Tell whether an override sets Hydra's own node, which is constant over a sweep.

    Raises:
        BadValueError: one is swept.
    """
    if override.is_hydra_override() and override.is_sweep_override():
        raise BadValueError(
            f"`{override.input_line}`: Hydra's own settings are the same for all cells. What a "
            "cell needs is part of the cell: sweep `resources.nodes` or `resources.ranks_per_node`."
        )
    return bool(override.is_hydra_override())


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
    _refuse_repeated(factors)
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


def _refuse_repeated(axes: Sequence[Axis]) -> None:
    """Refuse an axis that holds a value more than once: its cells would silently be one."""
    for axis in axes:
        for value in dict.fromkeys(axis.values):
            if (times := axis.values.count(value)) > 1:
                raise BadValueError(
                    f"`{' '.join(value)}` is named {times} times, and a cell is one cell however often it is "
                    "named. Name each value once; `measurement.blocks=N` repeats every cell."
                )


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
