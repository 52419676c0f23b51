"""Checks a composed configuration and builds the frozen spec; the only module that does."""

import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vitsweep.errors import BadValueError
from vitsweep.interpreters import find_here
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.generators import seeded_generators
from vitsweep.spec.menu import content_of, plain_choice
from vitsweep.words import did_you_mean, spelled

Tree = dict[str, Any]


class Word(NamedTuple):
    """Metadata of a field: a text that matches is a value, since nothing is called, read or written by it."""

    pattern: str


MOST_BUILT = 10_000
"""Parts of cells that are kept for cells that share them, before they are built anew."""
_built: dict[tuple[type, str, str], Any] = {}


def cell_from_tree(tree: Mapping[str, Any]) -> CellSpec:
    """Build the spec of one cell from its resolved tree.

    Args:
        tree: composed configuration without `auto` values; keys that are no part of a cell
            (`sweep`, `tracker`) are left alone.

    Raises:
        BadValueError: a key is missing, unknown, or its value is not allowed; all such are named.
    """
    hints = hints_of(CellSpec)
    default = plain_choice("objective")  # of what was frozen before there were others
    tree = {"objective": {**content_of("objective", default), "name": default}, **tree}
    missing = [name for name in hints if name not in tree]
    if missing:
        raise BadValueError(
            f"The configuration lacks {_quoted(missing)}. A cell that another version froze is "
            "measured anew by its command."
        )
    parts: Tree = {}
    problems: list[str] = []
    for name, kind in hints.items():
        try:
            parts[name] = _build(tree[name], name, kind)
        except BadValueError as error:
            problems.append(str(error))
    if problems:
        raise BadValueError("\n".join(problems))
    return CellSpec(**parts)


def part_from_tree(tree: Mapping[str, Any], name: str) -> Any:
    """Build one part of a cell (`data`, `precision`, ...), for whoever needs it before the rest."""
    return _build(tree[name], name, hints_of(CellSpec)[name])


def section_from_tree(cls: type, node: Mapping[str, Any], path: str) -> Any:
    """Build a dataclass of values and nested sections; messages name them as `path.key`.

    Raises:
        BadValueError: a key is missing, unknown, or its value is not allowed; all such are named.
    """
    return _build_dataclass(cls, dict(node), path)


def target_class(node: Mapping[str, Any], path: str) -> type:
    """Return the class that `_target_` of a node names.

    Raises:
        BadValueError: there is no such class, or it is none of vitsweep's or a plugin's techniques.
    """
    target = node.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise BadValueError(
            f"`{path}._target_={target}` must name a class, like `package.module.Class`."
        )
    module, _, name = target.rpartition(".")
    try:
        cls: type = getattr(_module(module), name)
        return cls
    except (ImportError, AttributeError) as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        way_out = ": install it, or put its folder on `PYTHONPATH`" if is_missing else ""
        raise BadValueError(
            f"`{path}._target_={target}` cannot be imported ({error}){way_out}."
        ) from error


def _build(node: Any, path: str, kind: Any) -> Any:
    if isinstance(node, Mapping):
        cls = target_class(node, path) if "_target_" in node else kind
        if not _is_section(cls):
            raise BadValueError(
                f"`{path}._target_={node['_target_']}` names no class of settings."
                if "_target_" in node
                else f"`{path}` takes a single value, not a section."
            )
        if inspect.isclass(kind) and not issubclass(cls, kind):
            raise BadValueError(
                f"`{path}._target_` names `{cls.__name__}`, which is no {kind.__name__}."
            )
        return _shared(cls, node, path)
    if _is_section(kind):
        raise BadValueError(f"`{path}={node}` must be a choice of the group `{path}`.")
    return _leaf(kind, node, path)


def _shared(cls: type, node: Mapping[str, Any], path: str) -> Any:
    """Build a part of a cell, or return that of an earlier cell with the same settings: it is frozen."""
    content = {key: value for key, value in node.items() if key != "_target_"}
    try:
        key = cls, path, json.dumps(content)
    except (TypeError, ValueError):
        return _build_dataclass(cls, content, path)
    if key not in _built:
        if len(_built) > MOST_BUILT:
            _built.clear()
        _built[key] = _build_dataclass(cls, content, path)
    return _built[key]


def _build_dataclass(cls: type, node: Tree, path: str) -> Any:
    hints = hints_of(cls)
    gone = {f.name for f in dataclasses.fields(cls) if f.metadata.get("gone")}
    known = [key for key in hints if key not in gone]
    has = f"`{path}` has {_quoted(known)}"
    problems = [
        f"`{path}.{key}` does not exist{did_you_mean(key, known, lambda name: f'{path}.{name}', has)}"
        for key in node
        if key not in hints
    ]
    optional = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    # a cell that was frozen before a field lacks it
    missing = [key for key in hints if key not in node and key not in optional]
    problems += [f"`{path}.{key}` is missing." for key in missing]
    values: Tree = {}
    for key in hints.keys() & node.keys():
        try:
            kind, value, at = hints[key], node[key], f"{path}.{key}"
            if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
                values[key] = _leaf(kind, value, at)
            elif isinstance(value, Mapping):
                values[key] = _build_dataclass(kind, dict(value), at)
            else:
                keys = _quoted(f"{at}.{each}" for each in hints_of(kind))
                problems.append(
                    f"`{at}={_typed(value)}`: `{at}` is a section; set one of its keys: {keys}."
                )
        except BadValueError as error:
            problems.append(str(error))
    if problems:
        raise BadValueError("\n".join(problems))
    return cls(**values)


LARGEST_INTEGER = 2**63 - 1
"""A column of a table holds no larger one."""


def _leaf(kind: Any, value: Any, path: str) -> Any:
    value = tuple(value) if isinstance(value, list) else value
    if any(isinstance(v, int) and abs(v) > LARGEST_INTEGER for v in _flat(value)):
        raise BadValueError(f"`{path}={_typed(value)}`: must be at most {LARGEST_INTEGER}.")
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        problems = "; or ".join(dict.fromkeys(sentence(problem) for problem in error.errors()))
        problems = problems.replace("; or must be ", " or ")
        listed = [p["ctx"]["expected"] for p in error.errors() if p["type"] == "literal_error"]
        allowed, meant = re.findall(r"'(.+?)'", " ".join(listed)), "."
        if isinstance(value, str) and (allowed or spelled(value)):  # never another key
            meant = did_you_mean(value, allowed, f"{path}={{}}".format, fits=lambda w: path in w)
        raise BadValueError(f"`{path}={_typed(value)}`: {problems}{meant}") from error


def _flat(value: Any) -> list[Any]:
    return [part for v in value for part in _flat(v)] if isinstance(value, tuple) else [value]


_IN_YAML = {
    "tuple_type": "must be a list, like `[a,b]`",
    "list_type": "must be a list, like `[a,b]`",
    "dict_type": "must be a section, like `{key:value}`",
    "none_required": "must be null",
    "string_type": "must be a text; in quotes a number is one",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
}
"""Kind of an error -> what YAML calls the type that Python calls otherwise."""


def _typed(value: Any) -> str:
    """Return a value as one types it: null and true, and quotes where a text looks like neither."""
    if isinstance(value, str) and not _looks_like_no_text(value):
        return value
    return json.dumps(value)


def _looks_like_no_text(text: str) -> bool:
    try:
        return not isinstance(json.loads(text), str)
    except ValueError:
        return False


def sentence(problem: Any) -> str:
    """Return what is wrong with a value, from an error of pydantic."""
    said: str = (
        problem["msg"].replace("'", "`") if problem["type"] == "literal_error" else problem["msg"]
    )
    if problem["type"] in ("tuple_type", "list_type") and isinstance(problem["input"], str):
        return f"must be a list: `[{problem['input']}]`"
    return _IN_YAML.get(problem["type"], said.replace("Input should be", "must be"))


def _quoted(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return field -> annotation of a dataclass, metadata included; fields that are derived are left out."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(cls)
        if not field.metadata.get("derived")
    }


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def prepare(kind: Any) -> None:
    """Make what is kept of a class, of its fields and of the classes below it.

    Processes that are forked from this one then build cells without a delay at first use.
    """
    if not _is_section(kind):
        _adapter(kind)
        return
    for part in (*hints_of(kind).values(), *kind.__subclasses__()):
        prepare(part)


def _is_section(kind: Any) -> bool:
    return inspect.isclass(kind) and dataclasses.is_dataclass(kind)


def _module(name: str) -> Any:
    if name == "__main__":
        raise ImportError(
            "no other process can import what a notebook or script defines: put the class or function into a "
            "file"
        )
    if name.partition(".")[0] != "vitsweep":
        find_here(name)
    return importlib.import_module(name)


# A user's function, named by its path: `package.module.function`.


_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def is_function_path(text: str) -> bool:
    """Tell whether a text could be `package.module.function`."""
    return _PATH.fullmatch(text) is not None


def wrong_target(group: str, name: str, target: str | None, returns: str) -> str:
    """Say why `target` of a choice names no factory; "" where it may."""
    if target is None:
        return f"`{group}={name}` needs `{group}.target=package.module.function`, which returns {returns}."
    if not is_function_path(target):
        dotted = re.sub(r"(\.py)?[:/]", ".", target)
        shown = dotted if is_function_path(dotted) else "package.module.function"
        return f"`{group}.target={target}` must name a function or class with its module, as `{shown}`."
    return ""


def wrong_function(knob: str, path: str | None, arguments: str) -> Iterator[str]:
    """Say why a setting names no function of these arguments that can be imported."""
    if path is None:
        return
    try:
        if not (is_function_path(path) and callable(imported_function(path))):
            yield f"`{knob}={path}` must name a function of {arguments}, as `package.module.function`."
    except Exception as error:  # the module is the user's
        yield f"`{knob}={path}` cannot be imported ({type(error).__name__}: {error})."


GENERIC = re.compile(r"(build|make|create|get|load)(_|$)|.*model$|module$|main$")
"""Names of factories that say nothing of what they make."""


def title_of(name: str, target: str | None) -> str:
    """Return how tables name a choice of a user's: `module` by the class or function that it calls.

    Args:
        name: the choice as typed, perhaps from a YAML file of the user's, which is kept then.
        target: path of a function or class; of a function called `build_model` its module is named too.
    """
    if name != "module" or target is None or not is_function_path(target):
        return name
    _, function = parts = target.split(".")[-2:]
    return ".".join(parts) if GENERIC.match(function) else function


def built(argument: Any) -> Any:
    """Return an argument in which each mapping with `_target_` is what the function there returns.

    Raises:
        Exception: whatever importing or calling one raises.
    """
    if isinstance(argument, Mapping):
        parts = {name: built(part) for name, part in argument.items()}
        target = parts.pop("_target_", None)
        return imported_function(target)(**parts) if target else parts
    return [*map(built, argument)] if isinstance(argument, list | tuple) else argument


def targets_in(argument: Any) -> Iterator[str]:
    """Yield each `_target_` in an argument."""
    if isinstance(argument, Mapping):
        yield from (value for name, value in argument.items() if name == "_target_")
    if isinstance(argument, Mapping | list | tuple):
        for part in argument.values() if isinstance(argument, Mapping) else argument:
            yield from targets_in(part)


def imported_function(path: str) -> Any:
    """Return what stands at a path.

    What its import draws is the same in every process, and leaves no trace.

    Raises:
        Exception: whatever importing its module raises; AttributeError where it has no such name.
    """
    module, _, name = path.rpartition(".")
    with nullcontext() if module in sys.modules else seeded_generators(0, "import"):
        found = _module(module)
    try:
        return getattr(found, name)
    except AttributeError as error:
        there = {known.lower(): known for known in dir(found)}
        if not (near := get_close_matches(name.lower(), there, 1, 0.7)):
            raise
        meant = f"did you mean `{module}.{there[near[0]]}`?"
        raise AttributeError(f"{error}; {meant}") from error
