"""Running the product as its users do, each time in a process of its own."""

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
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
    # the key of the marks is made anew
    text = re.sub(r"(\bmark\"?: [\"']?)[0-9a-f]{32}\b", r"\1MARK", text)
    return re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", text)


def found(places: Sequence[str]) -> Any:
    """Return the first of some objects, `folder:name`, that a file in a folder of `vitsweep/` defines.

    Raises:
        LookupError: there is none.
    """
    for place in places:
        folder, _, names = place.partition(":")
        first, *inner = names.split(".")
        definition = re.compile(rf"^(def|class) {first}\b", re.M)
        for path in sorted((ROOT / "vitsweep" / folder).rglob("*.py")):
            if definition.search(path.read_text()):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                with suppress(AttributeError):
                    return reduce(getattr, inner, getattr(import_module(module), first))
    raise LookupError(f"{', '.join(places)}: not found")


def value_of(calls: Sequence[str], context: Mapping[str, Any]) -> Any:
    """Evaluate the first of some calls whose function exists and takes these arguments."""
    missing: Exception = LookupError("no call is named")
    for call in calls:
        folder, _, expression = call.rpartition(":")
        name = expression.partition("(")[0]
        try:
            own = {name: found([f"{folder}:{name}"])} if folder else {}
            return eval(expression, dict(context) | own)
        except (LookupError, AttributeError, TypeError) as error:
            missing = error
    raise missing
