"""Composer: cells out of config groups, equal to Hydra's composition at a fraction of its time.

Hydra composes each cell anew (about 40 ms, twice). Most overrides are local: they swap the file of
one group, or set one value. The composer lets Hydra compose what is *not* local once, checks in
Hydra's own list of sources that the node of a group comes from one file, and assembles cells from
these parts. What is not shown to be local is composed by Hydra, with all that sets the same key.
"""

from collections.abc import Iterable, Mapping, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override

from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import ComposedCell, Tree, copy_tree
from vitsweep.composition.conf_dir import conf_dir
from vitsweep.composition.fragment_cache import FragmentCache, Kind
from vitsweep.composition.set_value import NotLocalError, root_of, set_value
from vitsweep.composition.suggestions import unknown_key


class Composer:
    """Composes cells over one conf/.

    Args:
        loader: Hydra's, where a Hydra application runs already; else one over vitsweep's conf/.
        config_name: primary configuration.
        hydra_overrides: overrides of Hydra's own node, constant over the sweep.
    """

    def __init__(
        self,
        loader: ConfigLoader | None = None,
        config_name: str = "config",
        hydra_overrides: Sequence[str] = (),
    ) -> None:
        loader = loader or hydra_internals.open_loader(conf_dir())
        self._cache = FragmentCache(loader, config_name, hydra_overrides)

    def compose(self, overrides: Sequence[str] = ()) -> ComposedCell:
        """Compose one cell; without overrides the default one.

        Raises:
            BadValueError: a group, choice or key does not exist, or Hydra refuses an override.
        """
        parsed = self.parse(overrides)
        tree, choices = self._composed(parsed)
        self._refuse_unread_keys(tree, parsed)
        return ComposedCell(tuple(overrides), choices, self._named(tree, choices))

    @property
    def compositions(self) -> int:
        """How often Hydra composed a whole configuration."""
        return self._cache.compositions

    @property
    def default_choices(self) -> Mapping[str, str]:
        """Group -> choice of an empty command line, in the order of the defaults list."""
        return self._cache.base().choices

    def parse(self, overrides: Iterable[str]) -> list[Override]:
        """Parse overrides with Hydra's grammar.

        Raises:
            BadValueError: a text is no override.
        """
        return self._cache.parse(overrides)

    def options(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return self._cache.options(group)

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
        kinds = [(o, self._cache.kind(o)) for o in parsed]
        by_hydra = by_hydra | {root_of(o) for o, kind in kinds if kind is Kind.composed_value}
        local = [(o, k) for o, k in kinds if k.is_local and root_of(o) not in by_hydra]
        rest = [o for o, k in kinds if not k.is_local or root_of(o) in by_hydra]
        texts = tuple(str(o.input_line) for o in rest)
        base = self._cache.base(texts)
        if local and not base.is_static:
            raise NotLocalError("*")
        tree, choices = copy_tree(base.tree), dict(base.choices)
        chosen = [(o.key_or_group, str(o.value())) for o, k in local if k is Kind.choice]
        for group, choice in chosen:
            tree[group], choices[group] = copy_tree(self._cache.node(group, choice, texts)), choice
        for override in [o for o, kind in local if kind is Kind.value]:
            set_value(tree, override, choices)
        return tree, choices

    def _refuse_unread_keys(self, tree: Tree, parsed: list[Override]) -> None:
        """Refuse a key that nothing reads: a mistyped `+precison=O1` must not pass in silence."""
        known = self._cache.base().tree
        for override in parsed:
            if (root := root_of(override)) in tree and root not in known:
                raise unknown_key(override, [], root, known)

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
