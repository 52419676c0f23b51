"""FragmentCache: files read and configurations composed once, and which overrides are local.

An override is local if it changes the node of one group, or one value, and nothing else: then a cell
can be assembled from cached parts. Everything else needs Hydra to compose the whole configuration.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import Tree, has_interpolation
from vitsweep.composition.override_text import parse_overrides
from vitsweep.composition.set_value import NotLocalError, is_plain_value
from vitsweep.composition.suggestions import hydra_error_sentence, unknown_choice
from vitsweep.errors import BadValueError


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


class FragmentCache:
    """The parts of one conf/, each composed, read, parsed or proved once.

    Attributes:
        compositions: how often Hydra composed a whole configuration.
    """

    def __init__(
        self, loader: ConfigLoader, config_name: str, hydra_overrides: Sequence[str]
    ) -> None:
        self.loader = loader
        self.config_name = config_name
        self.hydra_overrides = list(hydra_overrides)
        self.compositions = 0
        self._kinds: dict[str, Kind] = {}
        self._nodes: dict[tuple[str, str], Any] = {}
        self._bases: dict[tuple[str, ...], HydraComposition] = {}
        self._sources: dict[tuple[str, ...], list[tuple[str, str]]] = {}
        self._owners: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def parse(self, texts: Iterable[str]) -> list[Override]:
        """Parse overrides, each text once.

        Raises:
            BadValueError: a text is no override.
        """
        return parse_overrides(texts, self.loader)

    def options(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return sorted(self.loader.get_group_options(group))

    def base(self, texts: tuple[str, ...] = ()) -> HydraComposition:
        """Return the configuration of some overrides, composed by Hydra.

        Raises:
            BadValueError: Hydra refuses them.
        """
        if texts not in self._bases:
            self._bases[texts] = self._compose(texts)
        return self._bases[texts]

    def kind(self, override: Override) -> Kind:
        """Return what an override does.

        Raises:
            BadValueError: a group has no such choice.
        """
        text = str(override.input_line)
        if text not in self._kinds:
            self._kinds[text] = self._kind(override)
        return self._kinds[text]

    def node(self, group: str, choice: str, base: tuple[str, ...]) -> Any:
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
                self._sources[base] = hydra_internals.sources(
                    self.loader, self.config_name, [*self.hydra_overrides, *base]
                )
            found = self._sources[base]
            self._owners[group, base] = [path for path, at in found if self._fills(path, at, group)]
        if self._owners[group, base] != [f"{group}/{self.base(base).choices.get(group)}"]:
            raise NotLocalError(group)
        return self._nodes[group, choice]

    @cached_property
    def _files(self) -> Any:
        return hydra_internals.repository(self.loader, self.config_name, self.hydra_overrides)

    def _compose(self, texts: tuple[str, ...]) -> HydraComposition:
        self.compositions += 1
        asked = [*self.hydra_overrides, *texts]
        try:
            config = hydra_internals.compose(self.loader, self.config_name, asked)
            tree = hydra_internals.plain(config)
            is_static = not has_interpolation(tree)
            tree = tree if is_static else hydra_internals.plain_resolved(config)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            what = f"`{' '.join(texts)}`" if texts else "The configuration"
            raise BadValueError(
                hydra_error_sentence(f"{what} cannot be composed", error)
            ) from error
        return HydraComposition(tree, hydra_internals.choices(config), is_static)

    def _kind(self, override: Override) -> Kind:
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
        if not changes or isinstance(choice, list) or group not in self.base().choices:
            return False
        file = hydra_internals.load_file(self._files, f"{group}/{choice}")
        if not isinstance(choice, str) or file is None or choice.endswith((".yaml", ".yml")):
            typed = hydra_internals.own_text(override)
            raise unknown_choice(group, typed, self.options(group))
        if "/" in group or file.has_defaults or file.package not in (None, group):
            return False
        self._nodes[group, choice] = file.content
        return not has_interpolation(file.content)

    def _fills(self, path: str, package: str, group: str) -> bool:
        if package:
            return package.split(".")[0] == group
        file = hydra_internals.load_file(self._files, path)
        return file is not None and isinstance(file.content, dict) and group in file.content
