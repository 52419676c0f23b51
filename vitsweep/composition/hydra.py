"""Hydra: texts parsed and written by its grammar, and all that vitsweep uses beyond its documented interface.

Hydra has no public way to turn overrides into cells without running them (hydra#2673).
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache, reduce
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import file_config_source, importlib_resources_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from vitsweep.composition import spelling
from vitsweep.errors import BadValueError
from vitsweep.spec.menu import choices, conf_dir, content_of
from vitsweep.words import did_you_mean, gone

# Error messages for unknown groups, choices and keys: as typed, the valid ones, the closest one.


class UnknownNameError(BadValueError):
    """A group, choice or key does not exist.

    Args:
        typed: the override, as typed.
        fault: what is wrong with it.
        word: that is unknown.
        valid: what stands there instead.
        as_typed: writes one of these as the override has it.
        otherwise: what there is, where nothing is close.
        fits: whether what would be suggested composes.
    """

    def __init__(
        self,
        typed: str,
        fault: str,
        word: str,
        valid: Iterable[str],
        as_typed: Callable[[str], str],
        otherwise: str = "",
        fits: Callable[[str], bool] = lambda words: True,
    ) -> None:
        self.typed = typed
        self._of_what = (typed, fault, word, list(valid), as_typed, otherwise)
        end = did_you_mean(word, self._of_what[3], as_typed, otherwise, fits)
        super().__init__(f"`{typed}`: {fault}{end}")

    def where(self, fits: Callable[[str], bool]) -> "UnknownNameError":
        """Return the same, with suggestions that fit."""
        return UnknownNameError(*self._of_what, fits)


def unknown_choice(
    group: str, choice: str, valid: Iterable[str], among: Iterable[str] = ()
) -> UnknownNameError:
    """Say which choices a group has; `among` are the values of which a swept one is unknown."""
    names, shown, typed = list(valid), group.lstrip("+"), ",".join(among) or choice
    copied = " yet: copy `conf/hydra/launcher/slurm_example_site.yaml` to that name"
    return UnknownNameError(
        f"{group}={typed}",
        f"`{group}` has no choice `{choice}`" + copied * choice.startswith("slurm_"),
        typed,
        names,
        lambda name: f"{group}={name}",
        f"it has {_listed(names)}"
        if len(names) < 20
        else f"`python -m vitsweep show {shown}` lists all",
    )


_UNTYPED = ("hydra", "tracker")
"""Sections whose values no cell checks."""


def unknown_key(
    override: Override, path: Sequence[str], key: str, tree: Mapping[str, Any], choice: str = ""
) -> UnknownNameError:
    """Say which keys stand where `key` was looked for.

    Args:
        override: as typed.
        path: keys down to a group or a section of the configuration; empty for its root.
        key: what stands not there.
        tree: the configuration, where another section may have the key.
        choice: which choice of its group filled the section; "" where it is no group.
    """
    node = reduce(lambda part, name: part[name], path, tree)
    typed, names = str(override.input_line), [name for name in node if not name.startswith("_")]
    where = ".".join(path)
    _, _, value = typed.partition("=")
    rest = override.key_or_group.split(".")[len(path) + 1 :]
    parts = {name: p for name, p in tree.items() if isinstance(p, dict) and name not in _UNTYPED}
    counted = Counter((*(key for part in parts.values() for key in part), *names, *tree))
    elsewhere = {k: name for name, p in parts.items() for k in p if counted[k] == 1 and k[0] != "_"}

    def as_typed(name: str) -> str:
        keys = [elsewhere[name]] if name in elsewhere else path
        return f"{'.'.join([*keys, name, *rest])}={value}"

    has = f"there are {_listed(names)}" if names else f"another choice of `{where}` may have it"
    fault = f"`{where}{f'={choice}' if choice else ''}` has no key `{key}`"
    # a section that takes any key: of arguments, of variables
    if len(path) > 1 and path[0] != "hydra":
        near = get_close_matches(key, names, 1) or [key]
        written = as_typed(near[0]) if near[0] in names else f"++{typed.lstrip('+')}"
        return UnknownNameError(
            typed, fault, near[0], near, lambda name: written, f"`{written}` adds it"
        )
    others = [c for c in choices(where) if key in content_of(where, c)] if choice else []
    if others:
        has = f"{_listed(f'{where}={other}' for other in others[:3])} has it"
    return UnknownNameError(
        typed,
        fault if where else f"there is no group or key `{key}`",
        key,
        [*names, *elsewhere],
        as_typed,
        has if where else "`python -m vitsweep show` lists all",
    )


def hydra_error_sentence(what: str, error: BaseException) -> str:
    """Return Hydra's reason on one line, without its links and its hints for developers."""
    lines = [line.strip() for line in str(error or error.__cause__).splitlines()]
    if swept := re.search(r"configuration is not supported : '([\w.]+)=(.*)'", str(error)):
        quoted = f"`'{swept[1]}=\"{swept[2]}\"'`"
        return f"`{swept[1]}={swept[2]}` is read as several values; one text has quotes: {quoted}."
    kept = [line for line in lines if line and "https://" not in line and "HYDRA_FULL" not in line]
    return f"{what}: {' '.join(takewhile(lambda line: 'onfig search path:' not in line, kept))}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# A choice is a file inside of a folder of the search path, whoever types it.


class _Confined(ConfigSource):
    """Finds no file outside of the folders of the search path, be it named by `..` or by a link.

    A file that is no YAML is named with its line. Each is parsed once, and again when it has changed: Hydra
    reads the same hundred files for each composition.
    """

    read: ClassVar[dict[tuple[object, ...], Any]] = {}

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file, without `..` in its name."""
        return ".." not in Path(config_path).parts and super().is_config(config_path)

    def load_config(self, config_path: str) -> Any:
        """Return a file's content, which Hydra changes.

        Raises:
            BadValueError: it is no YAML, or sets something of a launcher that YAML reads as something else.
        """
        name = self._normalize_file_name(config_path)
        key = (self.provider, self.full_path(), name, *self.state(name))
        if key not in self.read:
            self.read[key] = self._parsed(config_path, name)
        return deepcopy(self.read[key])

    def _parsed(self, config_path: str, name: str) -> Any:
        try:
            found = super().load_config(config_path)
        except MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            is_tab = "'\\t'" in str(error.problem)
            why = "a tab stands where YAML takes spaces" if is_tab else error.problem
            raise BadValueError(
                f"`{config_path}` in `{self.path}` is no YAML, line {line}: {why}."
            ) from error
        if config_path.startswith(spelling.LAUNCHERS) or "hydra" in found.config:
            read: Any = OmegaConf.to_container(found.config, resolve=False)
            spelling.require_spelling(config_path, read, self.text(name))
        return found


class FileConfigSource(_Confined, file_config_source.FileConfigSource):
    """Named as Hydra's own: it registers no other name, nor replaces a class of the same."""

    roots: ClassVar[set[str]] = set()

    def available(self) -> bool:
        """Whether the folder is there.

        Raises:
            BadValueError: it is not, and was named.
        """
        if not super().available() and self.provider.startswith("hydra.searchpath"):
            raise BadValueError(
                f"`hydra.searchpath` names `{self.path}`, which is no folder: correct it, or leave it out."
            )
        return super().available()

    def is_config(self, config_path: str) -> bool:
        """Whether the folder, or one that was asked before, holds the file."""
        self.roots.add(os.path.join(os.path.realpath(self.path), ""))
        name = os.path.join(self.path, self._normalize_file_name(config_path))
        return super().is_config(config_path) and os.path.realpath(name).startswith((*self.roots,))

    def text(self, file: str) -> str:
        """Return the text of a file."""
        return Path(self.path, file).read_text(encoding="utf-8")

    def state(self, file: str) -> tuple[int, ...]:
        """Return what changes with the content of a file; nothing where there is none."""
        with suppress(OSError):
            found = os.stat(os.path.join(self.path, file))
            return found.st_ino, found.st_mtime_ns, found.st_size
        return ()


class ImportlibResourcesConfigSource(
    _Confined, importlib_resources_config_source.ImportlibResourcesConfigSource
):
    """YAML in installed packages; named likewise."""

    def text(self, file: str) -> str:
        """Return the text of a file."""
        return resources.files(self.path).joinpath(file).read_text(encoding="utf-8")

    def state(self, file: str) -> tuple[int, ...]:
        """Return nothing: what is installed stays."""
        return ()


@cache
def confine() -> None:
    """Let Hydra read the YAML of a choice from the folders of the search path alone, in this process."""
    Plugins.instance()  # registers its own
    SourcesRegistry.instance().types.update(
        file=FileConfigSource, pkg=ImportlibResourcesConfigSource
    )


@dataclass(frozen=True)
class ConfigFile:
    """One YAML of a group, as Hydra's repository reads it."""

    content: Any
    package: str | None
    has_defaults: bool


def open_loader(conf: Path, config_dir: str | Path | None = None) -> ConfigLoader:
    """Return a loader over `conf`, as `hydra.main` would make it.

    Args:
        conf: folder of the primary configuration.
        config_dir: folder with more choices and groups, as `--config-dir` adds it.

    Raises:
        BadValueError: `config_dir` is no folder.
    """
    if hydra.__version__.startswith("1.3."):
        # outside `hydra.main` it would act as 1.1; 1.4 knows one behaviour only
        version.setbase("1.3")
    confine()
    search_path = create_config_search_path(str(conf.resolve()))
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        if not folder.is_dir():
            raise BadValueError(
                f"`--config-dir {config_dir}`: there is no such folder below `{Path.cwd()}`."
            )
        search_path.prepend(
            "command-line", f"file://{folder}", anchor=SearchPathQuery(provider="schema")
        )
    return ConfigLoaderImpl(search_path)


def config_dir(loader: Any) -> list[str]:
    """Return `--config-dir FOLDER` as typed; nothing where no folder was added."""
    added = [p.path for p in loader.config_search_path.get_path() if p.provider == "command-line"]
    return ["--config-dir", added[0].removeprefix("file://")] if added else []


def parse(text: str, loader: ConfigLoader | None) -> Override:
    """Parse an override with Hydra's grammar; the loader lists the choices for `glob`."""
    return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]


def repository(loader: Any, config_name: str, hydra_overrides: Sequence[str]) -> Any:
    """Return the files behind a loader, `hydra.searchpath` included; each is read once."""
    return loader._parse_overrides_and_create_caching_repo(config_name, list(hydra_overrides))[1]


def load_file(repository: Any, path: str) -> ConfigFile | None:
    """Read `group/choice`, or return None where there is no such file."""
    loaded = repository.load_config(config_path=path)
    if loaded is None:
        return None
    content = OmegaConf.to_container(loaded.config, resolve=False)
    return ConfigFile(content, loaded.header.get("package"), bool(loaded.defaults_list))


def compose(loader: ConfigLoader, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose one configuration as Hydra's launchers do on a node."""
    return loader.load_configuration(config_name, list(overrides), RunMode.RUN, from_shell=False)


def compose_sweep(loader: ConfigLoader, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose what a sweep needs before its cells are, Hydra's own node included.

    Raises:
        BadValueError: Hydra refuses an override.
    """
    try:
        return loader.load_configuration(
            config_name, list(overrides), RunMode.MULTIRUN, from_shell=False
        )
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise BadValueError(
            hydra_error_sentence("The overrides cannot be composed", error)
        ) from error


def choice(config: DictConfig, part: str) -> str:
    """Return which `sweeper` or `launcher` is chosen."""
    return str(OmegaConf.select(config, f"hydra.runtime.choices.hydra/{part}"))


def launcher_of(config: DictConfig) -> Any:
    """Make the launcher that a configuration chooses.

    Raises:
        BadValueError: one of its settings cannot be read.
    """
    try:
        target = str(config.hydra.launcher._target_)
        # Hydra 1.4 asks for a list of what may be made, and 1.3 would give this to the launcher
        allowed = {} if hydra.__version__.startswith("1.3.") else {"_execution_whitelist_": target}
        return instantiate(config.hydra.launcher, **allowed)
    except (HydraException, OmegaConfBaseException) as error:
        raise BadValueError(hydra_error_sentence("The launcher cannot be set up", error)) from error


def sources(loader: Any, config_name: str, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return (file, package) of everything that is merged into a configuration, in order."""
    found = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN)
    return [(entry.config_path, entry.package or "") for entry in found.defaults]


def value_text(value: Any) -> str:
    """Write a value so that Hydra's parser reads it back as one value, not as a sweep."""
    return Override._get_value_element_as_str(value)


def own_text(override: Override) -> str:
    """Write the one value of an override that is not swept."""
    return override.get_value_element_as_str()


def axis_texts(override: Override) -> Iterator[str]:
    """Yield one override per value of a swept one, as Hydra's own sweeper writes them."""
    key = override.get_key_element()
    if override.is_sweep_override():
        return (f"{key}={value}" for value in override.sweep_string_iterator())
    return iter([override.input_line if override.is_delete() else f"{key}={own_text(override)}"])


def complete(verbs: Collection[str]) -> None:
    """Answer the Tab key, or print the script of a shell for it, as Hydra does; of a half-typed line nothing.

    Args:
        verbs: words that Hydra does not know, left out where the line begins with one.
    """
    program, *words = os.environ.get("COMP_LINE", "").split(" ")
    if words and words[0] in verbs:
        os.environ["COMP_LINE"] = " ".join([program, *words[1:]])
    sys.argv[0] = "vitsweep"  # which the script completes
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra raise: it would print below what is typed
    with suppress(HydraException, OmegaConfBaseException):
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(print)()


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain containers, without Hydra's own node."""
    return {key: node for key, node in with_own_node(config).items() if key != "hydra"}


def with_own_node(config: DictConfig) -> dict[str, Any]:
    """Return a composed configuration as plain containers, that of Hydra itself included."""
    tree: Any = OmegaConf.to_container(config, resolve=False)
    return {str(key): node for key, node in tree.items()}


def plain_resolved(config: DictConfig) -> dict[str, Any]:
    """Return the same with every `${...}` replaced."""
    nodes = {str(key): config[key] for key in config if key != "hydra"}
    containers = {k: n for k, n in nodes.items() if OmegaConf.is_config(n)}
    return nodes | {k: OmegaConf.to_container(n, resolve=True) for k, n in containers.items()}


def chosen(config: DictConfig) -> dict[str, Any]:
    """Return group -> choice in the order of the defaults list, Hydra's own groups left out."""
    known = {str(group): choice for group, choice in config.hydra.runtime.choices.items()}
    return {g: known[g] for g in reversed(known) if not g.startswith("hydra/")}


# Between text and overrides: texts are parsed with Hydra's grammar, values are written as texts.


_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_][\w./-]*")
_READ_AS_OTHER_THAN_TEXT = ("null", "true", "false", "inf", "nan")


def parse_overrides(texts: Iterable[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides with Hydra's grammar, each text once per process.

    Args:
        texts: as typed.
        loader: lists the choices of a group where `glob(...)` asks for them; without one the values
            of such an override cannot be enumerated.

    Raises:
        BadValueError: a text is no override.
    """
    return [_parsed(text, loader) for text in texts]


@lru_cache(maxsize=100_000)
def _parsed(text: str, loader: ConfigLoader | None) -> Override:
    try:
        override = parse(text, loader)
    except HydraException as error:
        raise BadValueError(_unreadable(text)) from error
    key, word, value = override.get_key_element(), text.partition("=")[2], override.value()
    if isinstance(value, ChoiceSweep):
        values = spelling.swept_as_spelled(key_of(key), word, value.list)
        is_same = values == value.list
        return override if is_same else parse(sweep_override(key, values), loader)
    if override.is_sweep_override() or override.is_delete():
        return override
    spelled = spelling.as_spelled(key_of(key), word, value)
    return override if spelled is None else parse(value_override(key, spelled), loader)


def key_of(text: str) -> str:
    """Return the key or group that an override as typed sets."""
    return text.lstrip("+~").partition("=")[0]


def _unreadable(text: str) -> str:
    """Say what Hydra's grammar does not read in an override, and how to quote it."""
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return f"`{text}` is no override: type `key=value`, such as `precision=O1`."
    if "(" in key:
        return (
            f"`{text}` cannot be read: a key comes first, as in `'optimizer=glob(adamw_*)'`; "
            "`'sweep.zip=[[sharding,precision]]'` lets keys advance together."
        )
    if value[:1] in ("[", "{"):
        return (
            f"`{text}` cannot be read: brackets must close, and a text in a list or section that holds "
            f"more than letters, digits and `.-_/` stands in quotes, such as `{key}=['a=b']`."
        )
    if ",," in text or text.endswith(","):
        return f"`{text}` cannot be read: a value is missing next to a comma."
    return (
        f"`{text}` cannot be read: a text that holds more than letters, digits and `.-_/` stands in "
        f'quotes, and in others for the shell: `"{value_override(key, value)}"`.'
    )


def value_override(key: str, value: Any) -> str:
    """Return the override that sets `key` to `value`: one value, never read as a sweep.

    Raises:
        BadValueError: no setting can have such a value.
    """
    return f"{key}={value_text(_quoted(plain_value(key, value)))}"


def sweep_override(key: str, values: list[Any]) -> str:
    """Return the override that sweeps `key` over `values`.

    Raises:
        BadValueError: no setting can have such a value.
    """
    plain = (_quoted(plain_value(key, value)) for value in values)
    return f"{key}=" + ",".join(map(value_text, plain))


def plain_value(key: str, value: Any) -> Any:
    """Return a value of Python's as Hydra's grammar has them: None, bool, number, text, list or dict.

    Numbers and arrays of numpy, pandas and torch, ranges and other iterables, and paths are converted.

    Args:
        key: of the setting, for the error.
        value: that a setting should have.

    Raises:
        BadValueError: it is none of these.
    """
    if hasattr(value, "tolist"):  # of numpy, pandas, torch: the number or list in Python's types
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {name: plain_value(key, part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [plain_value(key, part) for part in value]
    raise BadValueError(
        f"`{key}={value!r:.80}`: what is of type {type(value).__name__} is no value of a setting: give a "
        "number, a text, a path, True, False or None, or a list of these."
    )


def _quoted(value: Any) -> Any:
    """Quote the texts that Hydra's grammar would read as something else than a text."""
    if isinstance(value, dict):
        return {key: _quoted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quoted(part) for part in value]
    if not isinstance(value, str):
        return value
    if _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _READ_AS_OTHER_THAN_TEXT:
        return value
    return QuotedString(value, Quote.single)


# Overrides that nothing would read are refused, from the command line and from Python.


READ = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.searchpath")
"""Settings of Hydra's that vitsweep reads."""
ENVIRONMENT = ("hydra.job.env_set", "hydra.job.env_copy")
OWN_SWEEPER = "hydra/sweeper=vitsweep"
STOCK_LAUNCHERS = ("hydra/launcher=basic", "hydra/launcher=joblib", "hydra/launcher=submitit")
"""Hydra's own launchers do set the variables of `ENVIRONMENT` for their jobs."""


def refuse_ignored(overrides: Sequence[str], has_own_conf: bool) -> None:
    """Refuse settings that nothing reads, and a named sweep that does not exist or is typed as a value.

    Raises:
        BadValueError: there is one; the text says what to type instead.
    """
    has_stock = any(o.startswith(STOCK_LAUNCHERS) for o in overrides)
    for override in overrides:
        key, _, name = override.lstrip("+").partition("=")
        if key == "sweep" and not (re.match(r"\+[^+]", override) and name.isidentifier()):
            show = "`python -m vitsweep show sweep` lists all"
            meant = did_you_mean(name, choices("sweep"), "+sweep={}".format, show)
            fault = "`sweep` is a section of settings, a named sweep has a `+`"
            raise BadValueError(f"`{override}`: {fault}{meant}")
        if key == "sweep" and has_own_conf and name not in (names := choices("sweep")):
            raise unknown_choice("+sweep", name, names)
        sections = (*READ, *(ENVIRONMENT if has_stock else ()))
        is_read = any(f"{key.lstrip('~')}.".startswith(f"{section}.") for section in sections)
        if key.lstrip("~").startswith(("hydra.", "hydra/")) and not is_read:
            meant = did_you_mean(override, (), str)
            raise BadValueError(
                f"`{override}` changes nothing: vitsweep runs cells itself, keeps them in `sweep.folder`/"
                "`sweep.name`, and gives them `'runtime.variables={NAME:value}'`. Leave it out"
                f"{meant}"
            )
        if key == "hydra.launcher":
            raise BadValueError(f"`{override}` is a section; did you mean `hydra/launcher={name}`?")
        if key.startswith(("hydra/sweeper", "hydra.sweeper")) and override != OWN_SWEEPER:
            raise other_sweeper(override)
        _, launcher, setting = key.lstrip("~").partition("hydra.launcher.")
        if launcher and not any(o.lstrip("+").startswith("hydra/launcher") for o in overrides):
            raise BadValueError(
                f"`{override}`: the launcher of this machine has no settings. Those of a cluster need "
                f"`hydra/launcher=slurm` with them{gone(f'hydra.launcher.{setting}') or '.'}"
            )


def other_sweeper(typed: str) -> BadValueError:
    """Say that vitsweep expands grids itself; `typed` chooses or sets another sweeper."""
    return BadValueError(
        f"`{typed}`: vitsweep has one sweeper, its own, without settings: leave it out{gone(typed) or '.'}"
    )
