"""The grid: from a command line to its cells. Grammar as in Hydra, expansion by vitsweep."""

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import prod
from typing import Any

from hydra.core.override_parser.types import Override

from vitsweep.composition import hydra
from vitsweep.composition.composer import (
    BASELINE,
    NAMED_ONLY,
    OUTSIDE_THE_CELL,
    ComposedCell,
    Composer,
    Tree,
    is_of_baseline,
    root_of,
)
from vitsweep.composition.hydra import sweep_override, value_override
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.from_yaml import title_of

# The folder of a command that has no `sweep.name`: model, data, and the keys that vary.

AUTO = "auto"
"""`sweep.name` of a command that leaves the name to vitsweep."""

MANY_CELLS, MOST_VALUES = 10_000, 1_000_000
"""To compose and check more cells takes minutes; more values of one key are refused."""
MOST_KEYS = 6
"""More keys than this are counted instead of named."""


def named(
    cells: Sequence[ComposedCell], composer: Composer, swept: Collection[str] = ()
) -> list[ComposedCell]:
    """Return the cells with `sweep.name` set in their trees, where it was left to vitsweep.

    It is the name of a folder, such as `vit_nano-precision-sharding`. The values of the keys are not part
    of it, so that a wider grid continues in the same folder. Keys of techniques count wherever they are set:
    they vary between a cell and its baseline. Data are named where they are not the default.

    Args:
        cells: of one command.
        composer: knows the groups and their defaults.
        swept: keys that vary although these cells do not show it.
    """
    if not cells or cells[0].tree["sweep"]["name"] != AUTO:
        return list(cells)
    parsed = [composer.parse(cell.overrides) for cell in cells]
    values = [{_key(o): str(o.input_line).partition("=")[2] for o in each} for each in parsed]
    of_cell = {_key(o): root_of(o) for each in parsed for o in each}
    roots = {k: root for k, root in of_cell.items() if root not in (*OUTSIDE_THE_CELL, "hydra")}
    always = {*swept, *(key for key, root in roots.items() if root in (*GROUPS, "mesh"))}
    varying = [k for k in roots if k in always or len({cell.get(k) for cell in values}) > 1]
    groups = list(composer.default_choices)
    place = {
        key: groups.index(roots[key]) if roots[key] in groups else len(groups) for key in varying
    }
    names = [key.rpartition(".")[2] for key in sorted(varying, key=lambda k: (place[k], k))]
    names = [name for name in dict.fromkeys(names) if name not in ("model", "data")]
    more = [f"{len(names) - MOST_KEYS}_more"] if len(names) > MOST_KEYS else []
    limit_key = cells[0].tree["sweep"]["limit"]["key"]
    searched = [f"limit_of_{limit_key.rpartition('.')[2]}"] if limit_key else []
    name = "-".join([*_subjects(cells, composer), *names[:MOST_KEYS], *more, *searched])
    return [
        replace(cell, tree=cell.tree | {"sweep": cell.tree["sweep"] | {"name": name}})
        for cell in cells
    ]


def _subjects(cells: Sequence[ComposedCell], composer: Composer) -> Iterator[str]:
    """Yield the model, and the data if they are not the default; the group where several vary."""
    for group in ("model", "data"):
        # `~model` is refused later
        choices = {
            title_of(str(cell.choices.get(group, group)), cell.tree.get(group, {}).get("target"))
            for cell in cells
        }
        if len(choices) > 1:
            yield group
        elif group == "model" or choices != {composer.default_choices[group]}:
            yield from choices


def _key(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+~")


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

    Of two overrides with the same key the later counts, at the position of the first, as in Hydra.

    Raises:
        BadValueError: an override cannot be read, cannot be enumerated, or has no value.
    """
    axes: dict[str, Axis] = {}
    for override in composer.parse(overrides):
        if not _is_hydras_own(override):
            axis = _axis(override, composer)
            axes[axis.key] = axis
    return list(axes.values())


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
            f"`{text}`: an interval has no list of values. Use `range(...)` or `choice(...)`."
        )
    try:
        values = [(each,) for each in islice(hydra.axis_texts(override), MOST_VALUES + 1)]
        if set(values) == {(f"{key}=null",)}:
            # `cli.hydra_detour` names it twice, since Hydra refuses `choice(null)`
            values = values[:1]
    except ValueError as error:  # of Python's `range`
        raise BadValueError(f"`{text}` cannot be enumerated: {error}.") from error
    if len(values) > MOST_VALUES:
        raise BadValueError(f"`{text}` has more than {MOST_VALUES:,} values: sweep over fewer.")
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


def expand(
    overrides: Sequence[str],
    composer: Composer | None = None,
    of_machine: Callable[[Tree], Tree] = lambda sweep: sweep,
    say: Callable[[str], object] = lambda said: None,
) -> list[ComposedCell]:
    """Return the cells of a command line, each once, in the order of Hydra's own sweeper.

    Swept overrides multiply; the `axes` and `cells` of a named sweep (`+sweep=NAME`) multiply with
    them; axes named together in `sweep.zip` advance together. An override on the command line
    replaces one of the same key in the named sweep, and one in `cells` that of an axis.

    Args:
        overrides: as typed after `python -m vitsweep -m`; those of Hydra's own node are left out.
        composer: shares what is composed between calls.
        of_machine: gives the node `sweep` the part of it that is for a machine.
        say: is told how many cells there are, where it takes long to compose them.

    Raises:
        BadValueError: an override is wrong; the text names it as typed and the valid ones.
    """
    composer = composer or Composer()
    composer.refuse_unknown(overrides)
    typed_axes = axes_of(composer, overrides)
    of_sweep = [axis for axis in typed_axes if axis.root == "sweep"]
    for axis in of_sweep:
        if len(axis.values) > 1:
            raise BadValueError(
                f"`{axis.key}` cannot be swept: it says what the sweep is, one for all cells."
            )
    own = composer.parse([text for axis in of_sweep for text in axis.values[0]])
    of_named = [str(o.input_line) for o in own if not is_of_baseline(o)]
    sweep = of_machine(composer.compose(of_named).tree["sweep"])
    settings = sweep_settings({"sweep": sweep})
    texts = []
    for key, value in settings.axes.items():
        if value == []:
            raise BadValueError(f"`sweep.axes`: `{key}` has no value.")
        is_list = isinstance(value, list)
        texts.append(sweep_override(key, value) if is_list else f"{key}={value}")
    axes = {axis.key: axis for axis in axes_of(composer, texts)}
    axes |= {axis.key: axis for axis in typed_axes if axis.root != "sweep"}
    factors = zipped(list(axes.values()), settings.zip)
    for value, times in ((v, n) for axis in factors for v, n in Counter(axis.values).items()):
        if times > 1:  # its cells would silently be one
            raise BadValueError(
                f"`{' '.join(value)}` is named {times} times, and a cell is one cell however often it is "
                "named. Name each value once; `measurement.blocks=N` repeats every cell."
            )
    cells: list[tuple[str, ...]] = [] if settings.cells else [()]
    for entry in settings.cells:  # a list of overrides, or one text of them
        texts = shlex.split(entry) if isinstance(entry, str) else [str(text) for text in entry]
        of_entry = product(*(axis.values for axis in axes_of(composer, texts)))
        cells += [tuple(text for part in each for text in part) for each in of_entry]
    if (number := len(cells) * prod(len(axis.values) for axis in factors)) > MANY_CELLS:
        say(
            f"{number:,} cells are composed and checked first; Ctrl-C ends that, and nothing is written."
        )
    typed_keys = {axis.key for axis in typed_axes}
    typed_baseline = _TypedBaseline(sweep, own, typed_keys, composer)
    products = product(cells, *(axis.values for axis in factors))
    default, lists = composer.compose().tree["sweep"], []
    for cell, *parts in products:
        keyed = zip(composer.parse(cell), cell, strict=True)
        own_keys = tuple(text for o, text in keyed if o.get_key_element() not in typed_keys)
        kept = [cell, *parts, own_keys]  # keys that were typed replace axes
        of_cell = sweep | {"baseline": typed_baseline.of(parts)}
        not_default = {
            k: v for k, v in of_cell.items() if v != default.get(k) and k not in OF_THE_GRID
        }
        of_all = tuple(value_override(f"sweep.{k}", v) for k, v in not_default.items())
        lists.append(merge_overrides([*kept, of_all], composer))
    first: dict[str, ComposedCell] = {}
    for composed in map(composer.compose, lists):
        first.setdefault(composed.key, composed)
    has_cell = {text for cell in first.values() for text in cell.overrides}
    # what is typed besides may make a choice equal to another one in every cell
    for axis in typed_axes:
        lost = [t for [t] in axis.values if t not in has_cell] if axis.name in NAMED_ONLY else []
        given = [f"`{t}`" for a in typed_axes for [t] in a.values if a.root == axis.name != a.name]
        if lost:
            raise BadValueError(
                f"`{lost[0]}` has no cell of its own: with {', '.join(given) or 'its values'}, it equals "
                f"another choice of `{axis.name}`. Name one of them, or type other values."
            )
    return named([*first.values()], composer)


OF_THE_GRID = ("axes", "cells", "zip", "by_machine", "published", "reference")
"""Settings of a sweep that make its grid or explain it, and that no cell has."""


def merge_overrides(parts: Iterable[tuple[str, ...]], composer: Composer) -> list[str]:
    """Join the overrides of one cell; of two with the same key the later one counts."""
    texts = [text for part in parts for text in part]
    keyed: dict[str, Any] = {}
    for override, text in zip(composer.parse(texts), texts, strict=True):
        keyed[override.get_key_element()] = text
    return list(keyed.values())


# Baselines: what a speedup divides by, for every cell of a sweep.


class _TypedBaseline:
    """`sweep.baseline` of each cell: that of the named sweep, with what is typed.

    A typed `sweep.baseline` replaces all techniques of the named sweep's, `sweep.baseline.KEY` one of its
    keys. Its other settings are sizes that all cells share, such as `batch.images_per_step`; what is typed
    for their section is the baseline's as well, and a typed `sweep.match` may make them the cell's own.
    """

    def __init__(
        self, sweep: Tree, own: Sequence[Override], typed_keys: set[str], composer: Composer
    ) -> None:
        self.composer, self.typed_keys = composer, typed_keys
        self.told = [o for o in own if is_of_baseline(o)]
        self.named = sweep["baseline"]
        if isinstance(self.named, Mapping) and "sweep.match" in typed_keys:
            own_sections = {*sweep["match"]}
            self.named = {k: v for k, v in self.named.items() if _section(k) not in own_sections}
        fixed = baseline_settings(self.named, composer)
        self.sizes = {k: v for k, v in fixed.items() if _section(k) not in GROUPS}

    def of(self, parts: Sequence[Sequence[str]]) -> Any:
        """Return it for a cell with the values of these axes."""
        sections = {*map(_section, self.sizes)}
        typed = {
            o.get_key_element(): o.value()
            for o in self.composer.parse(text for part in parts for text in part)
            if sections and root_of(o) in sections and o.get_key_element() in self.typed_keys
        }
        found = baseline_settings(self.named, self.composer) | typed if typed else self.named
        for override in self.told:
            key, value = override.key_or_group.removeprefix(f"{BASELINE}."), override.value()
            if key != BASELINE:
                found = baseline_settings(found, self.composer) | {key: value}
            elif value is None or not self.sizes:
                found = value
            else:
                found = self.sizes | typed | baseline_settings(value, self.composer)
        return found


def baseline_settings(setting: Any, composer: Composer) -> dict[str, Any]:
    """Return `sweep.baseline` as a mapping, however it is written."""
    setting = tuple(setting) if isinstance(setting, list) else setting
    parsed = composer.parse(_as_overrides(setting) or ())
    return {o.get_key_element(): o.value() for o in parsed}


def _section(key: str) -> str:
    return key.lstrip("+").partition(".")[0]


ALWAYS_THE_CELLS_OWN = ("measurement", "objective", "recipe", "seed")
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
    groups = [*composer.default_choices, "seed"]
    if unknown := [name for name in settings.match if name not in groups]:
        listed = ", ".join(f"`{group}`" for group in groups if group not in GROUPS)
        raise BadValueError(
            f"`sweep.match` names `{unknown[0]}`, which is no group: a baseline can share {listed} with "
            "its cell."
        )
    kept = (*settings.match, *ALWAYS_THE_CELLS_OWN)
    reset = [group for group in composer.default_choices if group not in kept]
    own = [str(o.input_line) for o in composer.parse(cell.overrides) if root_of(o) not in reset]
    wanted = {group: composer.default_choices[group] for group in reset}
    try:
        for override in composer.parse(choices):
            if override.is_sweep_override():
                raise BadValueError(
                    f"`sweep.baseline`: `{override.input_line}` is several settings; a baseline is one."
                )
            if override.key_or_group in composer.default_choices:
                wanted[override.key_or_group] = str(override.value())
        baseline = composer.compose([*own, *choices])
        # where another override changed a group, its wanted choice is added by name
        other = [f"{g}={c}" for g, c in wanted.items() if baseline.choices.get(g) != c]
        return composer.compose([*own, *choices, *other]) if other else baseline
    except BadValueError as error:
        if not choices or "sweep.baseline" in str(error):
            raise
        raise BadValueError(
            f"`{value_override(BASELINE, settings.baseline)}`: {error} It takes choices instead of the "
            "default ones, such as `'sweep.baseline={precision:O1,sharding:fsdp}'`, or null."
        ) from error


def _as_overrides(setting: Any) -> list[str] | None:
    """Return `sweep.baseline` as overrides; None stands for no baseline."""
    if setting is None:
        return None
    if isinstance(setting, Mapping):
        return [value_override(str(key), value) for key, value in setting.items()]
    if isinstance(setting, tuple):
        return [str(text) for text in setting]
    return [] if setting in ("default", "") else shlex.split(str(setting))
