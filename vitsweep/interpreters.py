"""Where modules come from: in this process, and in the interpreters that it starts.

Code in the current folder is imported only where Python was told so (`python -m`, `PYTHONPATH`), or where
what was typed names it and it is nowhere else.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec

PARENT = "VITSWEEP_PARENT"
"""Variable that holds those which `like_this_one` changes, as they were."""
RUN = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); del sys.argv[:2]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def _here() -> str:
    """Return the current folder; "" where it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def search_path() -> list[str]:
    """Return `sys.path` as it is meant in another folder, too."""
    here = _here()
    return [os.path.abspath(p) if here and (not p or os.path.exists(p)) else p for p in sys.path]


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command of an interpreter that finds modules where this one does, and runs one of them."""
    return [sys.executable, "-P", "-c", RUN, json.dumps(search_path()), module, *arguments]


@contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start inside the block."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def like_this_one() -> AbstractContextManager[None]:
    """Context in which multiprocessing starts interpreters that find modules where this one does.

    They would look in the current folder first, for `multiprocessing` itself. A fork server of Python 3.11
    preloads its modules before it is told `sys.path`. Processes forked from it are told, and of the current
    folder where it comes last.
    """
    path, here = search_path(), _here()
    own = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
    return variables(
        {
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(path[:-1] if path[-1:] == [here] else path),
            PARENT: json.dumps(own),
        }
    )


def take_environment_of_parent() -> None:
    """Undo, in an interpreter that was started so, what `like_this_one` did to the environment."""
    _restore(json.loads(os.environ.pop(PARENT, "{}")))


def find_here(module: str) -> None:
    """Let a module that was typed be imported from the current folder, unless it is elsewhere.

    The folder then comes last in `sys.path`.

    Raises:
        ImportError: its package is both in the current folder and elsewhere.
    """
    top, here = module.partition(".")[0], _here()
    found = PathFinder.find_spec(top, [here]) if here else None
    if found is None or here in map(os.path.abspath, sys.path[:-1]):  # then Python was told
        return
    try:
        other = find_spec(top)
    except ValueError:  # a module that is loaded, and says not from where
        return
    if other is None:
        sys.path.append(here)
    elif found.loader is not None and other.origin not in (None, found.origin):
        raise ImportError(
            f"`{top}` is both `{found.origin}` in the current folder and `{other.origin}`: rename the one "
            "that is not meant, or type the command in another folder"
        )


def folder_on_path() -> tuple[str, ...]:
    """Return where the current folder is in `sys.path`, `first` or `last`, and its path; () elsewhere."""
    path, here = search_path(), _here()
    if here == path[0]:
        return "first", here
    return ("last", here) if here == path[-1] else ()
