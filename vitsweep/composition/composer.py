"""Composer: cells out of config groups, equal to Hydra's composition at a fraction of its time.

Hydra composes each cell anew (about 40 ms, twice). Most overrides are local: they swap the file of
one group, or set one value. The composer lets Hydra compose what is *not* local once, checks in
Hydra's own list of sources that the node of a group comes from one file, and assembles cells from
these parts. What is not shown to be local is composed by Hydra, with all that sets the same key.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import islice, product
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from vitsweep.composition import hydra
from vitsweep.composition.hydra import (
    UnknownNameError,
    hydra_error_sentence,
    key_of,
    parse_overrides,
    unknown_choice,
    unknown_key,
)
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resolve import resolve
from vitsweep.spec.resources import Machine

# ComposedCell: the overrides of one cell and the configuration composed from them, not yet typed.


Tree = dict[str, Any]

OUTSIDE_THE_CELL = ("sweep", "tracker", "metric", "machine")
"""Top-level nodes of the configuration that no cell has: where results go, and what defaults are."""
NAMED_ONLY = ("batch", "objective", "recipe", *GROUPS)
"""Groups in which the name of a choice decides nothing besides its values."""


@dataclass(frozen=True)
class ComposedCell:
    """One cell of a sweep before `spec.from_yaml`.

    Attributes:
        overrides: what to type to get exactly this cell; Hydra composes it from them as well.
        choices: config group -> choice, in the order of the defaults list.
        tree: the composed configuration as plain containers without Hydra's own node; the node of
            each group carries `name`, its choice.
    """

    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    tree: Tree

    @property
    def key(self) -> str:
        """Text that is equal for two cells whose configurations are equal, but for the names of choices."""
        cell = {k: v for k, v in self.tree.items() if k not in OUTSIDE_THE_CELL}
        cell |= {g: cell[g] | {"name": ""} for g in NAMED_ONLY if isinstance(cell.get(g), Mapping)}
        return json.dumps(cell, sort_keys=True, default=str)


def copy_tree(node: Any) -> Any:
    """Copy nested plain containers, so that no two cells share one."""
    if isinstance(node, dict):
        return {key: copy_tree(value) for key, value in node.items()}
    if isinstance(node, list):
        return [copy_tree(value) for value in node]
    return node


def has_interpolation(node: Any) -> bool:
    """True where a `${...}` makes a part depend on others."""
    if isinstance(node, dict):
        return any(has_interpolation(part) for pair in node.items() for part in pair)
    if isinstance(node, list):
        return any(map(has_interpolation, node))
    return isinstance(node, str) and "${" in node


# Setting one value in a plain tree exactly as Hydra sets it in a composed configuration.


_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SETS = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


class NotLocalError(Exception):
    """A cell cannot be assembled from cached parts: Hydra must compose what sets a key.

    Attributes:
        root: the top-level key; `*` for all of them.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = root


def root_of(override: Override) -> str:
    """Return the top-level key that an override sets."""
    return override.key_or_group.replace("/", ".").split(".")[0]


BASELINE = "sweep.baseline"


def is_of_baseline(override: Override) -> bool:
    """Tell whether an override says what baselines are.

    A named sweep may say it too. Hydra would merge the two, or refuse; in `grid.expand` what is typed wins.
    """
    key = override.key_or_group
    return (key == BASELINE or key.startswith(f"{BASELINE}.")) and not override.is_delete()


def belongs_to_the_sweep(override: Override) -> bool:
    """Tell whether Hydra composes an override for the whole sweep: what this is, or Hydra's own."""
    is_outside = root_of(override) in OUTSIDE_THE_CELL and not is_of_baseline(override)
    return is_outside or bool(override.is_hydra_override())


def is_plain_value(override: Override) -> bool:
    """True for an override that sets one value and can affect nothing else."""
    return (
        override.type in _SETS
        and override.package is None
        and _PLAIN_KEY.fullmatch(override.key_or_group) is not None
        and _is_plain(override.value())
    )


def set_value(
    tree: dict[str, Any], override: Override, choices: Mapping[str, str] | None = None
) -> None:
    """Set the value of an override in `tree`.

    Args:
        tree: the configuration.
        override: of one value.
        choices: group -> choice that filled its node, for errors.

    Raises:
        BadValueError: the key does not exist, or `+` meets one that does.
        NotLocalError: Hydra has a rule of its own for the present value of the key.
    """
    *path, last = override.key_or_group.split(".")
    node, adds = tree, override.type is not OverrideType.CHANGE
    chosen = (choices or {}).get(path[0], "") if path else ""
    for depth, key in enumerate(path):
        if key not in node and not adds:
            raise unknown_key(override, path[:depth], key, tree, chosen if depth == 1 else "")
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise NotLocalError(path[0])
    if last not in node and not adds:
        raise unknown_key(override, path, last, tree, chosen if len(path) == 1 else "")
    old, new = node.get(last), override.value()
    if isinstance(old, dict):
        raise NotLocalError(root_of(override))
    is_free = old is None or old == "???" or isinstance(new, list)
    if override.type is OverrideType.ADD and not is_free:
        text = str(override.input_line).lstrip("+")
        raise BadValueError(
            f"`+{text}` would add what exists already (`{override.key_or_group}={old}`): "
            f"leave the `+` out, `{text}`."
        )
    node[last] = new


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "${" not in value
    return value is None or isinstance(value, (bool, int, float))


# An override is local if it changes the node of one group, or one value, and nothing else: then a cell
# can be assembled from cached parts. Everything else needs Hydra to compose the whole configuration.


class Kind(Enum):
    """What an override does, and whether that is local."""

    choice = auto()  # swaps the file of one group
    value = auto()  # sets one value
    composed_choice = auto()  # chooses a file, or a setting of Hydra itself, with wider effects
    composed_value = auto()  # sets something for which Hydra has rules of its own

    @property
    def is_local(self) -> bool:
        """True where a cell can be assembled without Hydra composing it."""
        return self in (Kind.choice, Kind.value)


@dataclass(frozen=True)
class HydraComposition:
    """A whole configuration as Hydra composed it.

    Attributes:
        tree: plain containers, without Hydra's own node.
        choices: config group -> choice, in the order of the defaults list.
        is_static: True where it held no `${...}`, so that no part depends on another.
    """

    tree: Tree
    choices: Mapping[str, str]
    is_static: bool


ANY_MACHINE = Machine(device="cuda", cores_per_node=8, devices_per_node=8)
"""On which `Composer.takes` tries a cell."""


def _refused(tree: Tree) -> str:
    """Return which values of a tree are wrong on any machine; "" where none is."""
    try:
        sweep_settings(tree)
        cell_from_tree(resolve(tree, ANY_MACHINE))
    except VitsweepError as error:
        return str(error)
    return ""


class Composer:
    """Composes cells over one conf/: each part is composed, read, parsed or proved once.

    Args:
        loader: Hydra's, where a Hydra application runs already; else one over vitsweep's conf/.
        config_name: primary configuration.
        hydra_overrides: overrides of Hydra's own node, constant over the sweep.

    Attributes:
        compositions: how often Hydra composed a whole configuration.
    """

    def __init__(
        self,
        loader: ConfigLoader | None = None,
        config_name: str = "config",
        hydra_overrides: Sequence[str] = (),
    ) -> None:
        self.loader = loader or hydra.open_loader(conf_dir())
        self.config_name = config_name
        self.hydra_overrides = list(hydra_overrides)
        self.compositions = 0
        self._cells: dict[tuple[str, ...], ComposedCell] = {}
        self._kinds: dict[str, Kind] = {}
        self._nodes: dict[tuple[str, str], Any] = {}
        self._bases: dict[tuple[str, ...], HydraComposition] = {}
        self._sources: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        self._owners: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def compose(self, overrides: Sequence[str] = ()) -> ComposedCell:
        """Compose one cell, the same overrides once; without any the default cell.

        Raises:
            BadValueError: a group, choice or key does not exist, or Hydra refuses an override.
        """
        if (texts := tuple(overrides)) not in self._cells:
            parsed = self.parse(texts)
            try:
                tree, choices = self._composed(parsed)
                known = self._base().tree
                for override in parsed:  # a mistyped `+precison=O1` must not pass in silence
                    if (root := root_of(override)) in tree and root not in known:
                        raise unknown_key(override, [], root, known)
            except UnknownNameError as error:
                raise self._answered(error, texts) from error
            self._cells[texts] = ComposedCell(texts, choices, self._named(tree, choices))
        return self._cells[texts]

    def refuse_unknown(self, overrides: Sequence[str]) -> None:
        """Refuse a key whose group or section, or a swept choice that does not exist, as it was typed.

        Raises:
            BadValueError: there is one.
        """
        known = self._base().tree
        for override in self.parse(overrides):
            root, group = root_of(override), override.key_or_group
            is_read = override.type is OverrideType.CHANGE or not self._files.group_exists(group)
            if is_read and not override.is_delete() and root not in (*known, "hydra"):
                raise self._answered(unknown_key(override, [], root, known), overrides)
            if not override.is_choice_sweep() or group not in self.default_choices:
                continue
            values = [text.partition("=")[2] for text in hydra.axis_texts(override)]
            for value in values:
                if hydra.load_file(self._files, f"{group}/{value}") is None:
                    unknown = unknown_choice(group, value, self.options(group), values)
                    raise self._answered(unknown, overrides)

    def _answered(self, error: UnknownNameError, overrides: Sequence[str]) -> UnknownNameError:
        """Return an error whose suggestions compose with the other overrides."""
        others = [text for text in overrides if key_of(text) != key_of(error.typed)]
        return error.where(lambda words: self.takes(words, others))

    def takes(self, words: str, others: Sequence[str] = ()) -> bool:
        """Whether overrides, as typed, make a cell with the others of a line, or without them."""
        typed = [w for w in shlex.split(words) if not w.endswith("=...")]
        for rest in (others, ()):
            with suppress(VitsweepError, ValueError):
                values = [list(hydra.axis_texts(o)) for o in self.parse((*rest, *typed))]
                first = [texts[:1] for texts in values[: len(rest)]]
                each = product(*first, *values[len(rest) :])
                parsed = [self.parse(texts) for texts in islice(each, 8)]
                refused = "".join(_refused(self._named(*self._composed(p))) for p in parsed)
                named = (key_of(t) for t in typed if "/" not in t)  # a folder may be missing yet
                return not any("." in key and f"`{key}=" in refused for key in named)
        return False

    @property
    def default_choices(self) -> Mapping[str, str]:
        """Group -> choice of an empty command line, in the order of the defaults list."""
        return self._base().choices

    @property
    def words(self) -> list[str]:
        """What is typed besides overrides of cells: folder and name of the configuration, Hydra's node."""
        name = [] if self.config_name == "config" else ["--config-name", self.config_name]
        return [*hydra.config_dir(self.loader), *name, *self.hydra_overrides]

    def parse(self, overrides: Iterable[str]) -> list[Override]:
        """Parse overrides with Hydra's grammar.

        Raises:
            BadValueError: a text is no override.
        """
        return parse_overrides(overrides, self.loader)

    def options(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return sorted(self.loader.get_group_options(group))

    def _composed(self, parsed: list[Override]) -> tuple[Tree, dict[str, str]]:
        """Assemble a cell, leaving more and more top-level keys to Hydra until all parts are local."""
        by_hydra: set[str] = set()
        while True:
            try:
                return self._assembled(parsed, by_hydra)
            except NotLocalError as error:
                everything = {root_of(o) for o in parsed}
                by_hydra = everything if error.root in (*by_hydra, "*") else by_hydra | {error.root}

    def _assembled(self, parsed: list[Override], by_hydra: set[str]) -> tuple[Tree, dict[str, str]]:
        """Assemble a cell; overrides of the top-level keys in `by_hydra` are composed by Hydra.

        Raises:
            NotLocalError: one more key must be left to Hydra.
        """
        kinds = [(o, self._kind(o)) for o in parsed]
        by_hydra = by_hydra | {root_of(o) for o, kind in kinds if kind is Kind.composed_value}
        local = [(o, k) for o, k in kinds if k.is_local and root_of(o) not in by_hydra]
        rest = [o for o, k in kinds if not k.is_local or root_of(o) in by_hydra]
        texts = tuple(str(o.input_line) for o in rest)
        base = self._base(texts)
        if local and not base.is_static:
            raise NotLocalError("*")
        tree, choices = copy_tree(base.tree), dict(base.choices)
        chosen = [(o.key_or_group, str(o.value())) for o, k in local if k is Kind.choice]
        for group, choice in chosen:
            tree[group], choices[group] = copy_tree(self._node(group, choice, texts)), choice
        for override in [o for o, kind in local if kind is Kind.value]:
            set_value(tree, override, choices)
        return tree, choices

    def _named(self, tree: Tree, choices: Mapping[str, str]) -> Tree:
        """Give each group's node its choice as `name`: the value in tables, the label in charts.

        A node whose YAML asks for a name of its own (`model=timm model.name=...`) keeps it.
        """
        for group in self.default_choices:
            node: object = tree
            for key in group.rpartition("@")[2].replace("/", ".").split("."):
                node = node.get(key) if isinstance(node, dict) else None
            if isinstance(node, dict) and group in choices and not node.get("name"):
                node["name"] = choices[group]
        return tree

    def _base(self, texts: tuple[str, ...] = ()) -> HydraComposition:
        """Return the configuration of some overrides, composed by Hydra.

        Raises:
            BadValueError: Hydra refuses them.
        """
        if texts not in self._bases:
            self.compositions += 1
            asked = [*self.hydra_overrides, *texts]
            try:
                config = hydra.compose(self.loader, self.config_name, asked)
                tree = hydra.plain(config)
                is_static = not has_interpolation(tree)
                tree = tree if is_static else hydra.plain_resolved(config)
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                what = f"`{' '.join(texts)}`" if texts else "The configuration"
                text = hydra_error_sentence(f"{what} cannot be composed", error)
                raise BadValueError(text) from error
            self._bases[texts] = HydraComposition(tree, hydra.chosen(config), is_static)
        return self._bases[texts]

    def _kind(self, override: Override) -> Kind:
        """Return what an override does.

        Raises:
            BadValueError: a group has no such choice.
        """
        text = str(override.input_line)
        if text not in self._kinds:
            self._kinds[text] = self._kind_anew(override)
        return self._kinds[text]

    def _node(self, group: str, choice: str, base: tuple[str, ...]) -> Any:
        """Return what a choice puts at the node of its group.

        Args:
            group: config group.
            choice: its choice, of kind `Kind.choice`.
            base: overrides of the configuration into which the node is put.

        Raises:
            NotLocalError: in that configuration another file writes into the node as well.
        """
        if (group, base) not in self._owners:
            if base not in self._sources:
                self._sources[base] = hydra.sources(
                    self.loader, self.config_name, [*self.hydra_overrides, *base]
                )
            found = self._sources[base]
            self._owners[group, base] = [path for path, at in found if self._fills(path, at, group)]
        if self._owners[group, base] != [f"{group}/{self._base(base).choices.get(group)}"]:
            raise NotLocalError(group)
        return self._nodes[group, choice]

    @cached_property
    def _files(self) -> Any:
        return hydra.repository(self.loader, self.config_name, self.hydra_overrides)

    def _kind_anew(self, override: Override) -> Kind:
        if override.is_hydra_override():
            return Kind.composed_choice
        is_group = bool(self._files.group_exists(override.key_or_group))
        if is_group and not isinstance(override.value(), dict):
            return Kind.choice if self._is_local_choice(override) else Kind.composed_choice
        is_local = not is_group and is_plain_value(override)
        return Kind.value if is_local else Kind.composed_value

    def _is_local_choice(self, override: Override) -> bool:
        """True for `group=choice` whose file fills the node of its group and nothing else."""
        group, choice = override.key_or_group, override.value()
        changes = override.type is OverrideType.CHANGE and override.package is None
        if not changes or isinstance(choice, list) or group not in self._base().choices:
            return False
        file = hydra.load_file(self._files, f"{group}/{choice}")
        if not isinstance(choice, str) or file is None or choice.endswith((".yaml", ".yml")):
            typed = hydra.own_text(override)
            raise unknown_choice(group, typed, self.options(group))
        if "/" in group or file.has_defaults or file.package not in (None, group):
            return False
        self._nodes[group, choice] = file.content
        return not has_interpolation(file.content)

    def _fills(self, path: str, package: str, group: str) -> bool:
        if package:
            return package.split(".")[0] == group
        file = hydra.load_file(self._files, path)
        return isinstance(content := file and file.content, dict) and group in content
