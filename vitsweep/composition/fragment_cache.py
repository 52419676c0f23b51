"""FragmentCache: what Hydra composed or read once, and the proof that a piece stands for itself."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from vitsweep.composition import hydra_internals
from vitsweep.composition.composed_cell import Tree, has_interpolation
from vitsweep.composition.set_value import NotLocalError, is_plain_value
from vitsweep.composition.suggestions import told_plainly, unknown_choice
from vitsweep.errors import BadValueError


@dataclass(frozen=True)
class Base:
    """A whole configuration as Hydra composed it; `is_static` where it holds no `${...}`."""

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
        self._parsed: dict[str, Override] = {}
        self._kinds: dict[str, str] = {}
        self._nodes: dict[tuple[str, str], Any] = {}
        self._bases: dict[tuple[str, ...], Base] = {}
        self._owners: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def parse(self, texts: Iterable[str]) -> list[Override]:
        """Parse overrides, each text once.

        Raises:
            BadValueError: a text is no override.
        """
        return [self._parsed.get(text) or self._parse(text) for text in texts]

    def options(self, group: str) -> list[str]:
        """Return the choices of a group."""
        return sorted(self.loader.get_group_options(group))

    def base(self, texts: tuple[str, ...] = ()) -> Base:
        """Return the configuration of some overrides, composed by Hydra.

        Raises:
            BadValueError: Hydra refuses them.
        """
        if texts not in self._bases:
            self._bases[texts] = self._compose(texts)
        return self._bases[texts]

    def kind(self, override: Override) -> str:
        """Return `choice` or `value` for what is local, `hard choice` or `hard value` for the rest.

        Raises:
            BadValueError: a group has no such choice.
        """
        text = str(override.input_line)
        if text not in self._kinds:
            self._kinds[text] = self._kind(override)
        return self._kinds[text]

    def node(self, group: str, choice: str, base: tuple[str, ...]) -> Any:
        """Return what a choice puts at the node of its group.

        Raises:
            NotLocalError: in this base another file reaches into the node as well.
        """
        if (group, base) not in self._owners:
            found = hydra_internals.sources(
                self.loader, self.config_name, [*self.hydra_overrides, *base]
            )
            self._owners[group, base] = [path for path, at in found if self._fills(path, at, group)]
        if self._owners[group, base] != [f"{group}/{self.base(base).choices.get(group)}"]:
            raise NotLocalError(group)
        return self._nodes[group, choice]

    @cached_property
    def _files(self) -> Any:
        return hydra_internals.repository(self.loader, self.config_name, self.hydra_overrides)

    def _parse(self, text: str) -> Override:
        try:
            self._parsed[text] = hydra_internals.parse(text, self.loader)
        except HydraException as error:
            raise BadValueError(told_plainly(f"`{text}` cannot be read", error)) from error
        return self._parsed[text]

    def _compose(self, texts: tuple[str, ...]) -> Base:
        self.compositions += 1
        asked = [*self.hydra_overrides, *texts]
        try:
            config = hydra_internals.compose(self.loader, self.config_name, asked)
            tree = hydra_internals.plain(config)
            is_static = not has_interpolation(tree)
            tree = tree if is_static else hydra_internals.plain_resolved(config)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            what = f"`{' '.join(texts)}`" if texts else "The configuration"
            raise BadValueError(told_plainly(f"{what} cannot be composed", error)) from error
        return Base(tree, hydra_internals.choices(config), is_static)

    def _kind(self, override: Override) -> str:
        if override.is_hydra_override():
            return "hard choice"
        is_group = bool(self._files.group_exists(override.key_or_group))
        if is_group and not isinstance(override.value(), dict):
            return "choice" if self._is_local_choice(override) else "hard choice"
        return "value" if not is_group and is_plain_value(override) else "hard value"

    def _is_local_choice(self, override: Override) -> bool:
        """True for `group=choice` whose file fills the node of its group and nothing else."""
        group, choice = override.key_or_group, override.value()
        changes = override.type is OverrideType.CHANGE and override.package is None
        if not changes or isinstance(choice, list) or group not in self.base().choices:
            return False
        file = hydra_internals.load_file(self._files, f"{group}/{choice}")
        if not isinstance(choice, str) or file is None or choice.endswith((".yaml", ".yml")):
            raise unknown_choice(group, str(choice), self.options(group))
        if "/" in group or file.has_defaults or file.package not in (None, group):
            return False
        self._nodes[group, choice] = file.content
        return not has_interpolation(file.content)

    def _fills(self, path: str, package: str, group: str) -> bool:
        if package:
            return package.split(".")[0] == group
        file = hydra_internals.load_file(self._files, path)
        return file is not None and isinstance(file.content, dict) and group in file.content
