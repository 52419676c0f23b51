"""Running the product as its users do, each time in a process of its own."""

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("lists.yaml").read_text())


def forked(task: Callable[[], object], folder: Path, columns: int = 80) -> str:
    """Run a task in a process that has imported nothing of vitsweep; return code and output.

    Args:
        task: what to do; its result is the exit code.
        folder: its working directory.
        columns: width of the terminal.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (pid := os.fork()):
            code: object = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.chdir(folder)
                os.environ |= environment(folder) | {"COLUMNS": str(columns)}
                code = task() or 0
            except SystemExit as left:
                code = left.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return masked(f"exit code {code}\n{out.read()}--- stderr\n{err.read()}", folder)


def environment(folder: Path) -> dict[str, str]:
    """Return variables for a process that runs the product: with a Slurm that takes every job."""
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "VITSWEEP_PREDICT": "never",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
    }


def command(words: Sequence[str]) -> Callable[[], object]:
    """Return a task that is `python -m vitsweep WORDS`."""

    def task() -> object:
        sys.argv = [str(ROOT / "vitsweep" / "__main__.py"), *words]
        return import_module("vitsweep.__main__").main()

    return task


def masked(text: str, folder: Path) -> str:
    """Replace what differs from one recording to the next."""
    for path, name in ((folder, "FOLDER"), (sys.executable, "PYTHON"), (ROOT, "ROOT")):
        text = text.replace(str(path), name)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(\+00:00)?", "TIME", text)
    text = re.sub(r"\b(Submitted|written) in [\d.]+ s", r"\1 in SECONDS s", text)
    return re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", text)


def found(places: Sequence[str]) -> Any:
    """Return the object at the first `module:name` of some that can be imported.

    Raises:
        LookupError: there is none.
    """
    for place in places:
        module, _, names = place.partition(":")
        try:
            thing = import_module(module)
            for name in names.split("."):
                thing = getattr(thing, name)
        except (ImportError, AttributeError):
            continue
        return thing
    raise LookupError(f"none of {places} exists")


def value_of(places: Sequence[str], context: Mapping[str, Any]) -> Any:
    """Evaluate the first of some entries whose function exists and takes these arguments."""
    missing: Exception = LookupError(f"none of {places} exists")
    for place in places:
        module, _, call = place.rpartition(":")
        try:
            names = dict(context)
            if module:
                name = call.partition("(")[0]
                names[name.partition(".")[0]] = found([f"{module}:{name.partition('.')[0]}"])
            return eval(call or place, names)
        except (LookupError, AttributeError, TypeError) as error:
            missing = error
    raise missing
