"""`vitsweep retry`: the commands of a sweep once more, for cells that ended otherwise."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.results.store import Store

NOT_RETRIED = (Status.measured, Status.invalid)


def retry_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs the last command of a sweep again.

    Args:
        arguments: `[SWEEP] [--status a,b] [[--set] override ...]`; without statuses all that ended
            otherwise run again. An override makes new cells, as in `--set resources.nodes=2`.

    Raises:
        VitsweepError: there is no such sweep, or no such status.
    """
    name, statuses, extra = _parsed(arguments)
    folder = Path(name) if (Path(name) / "cells").is_dir() else Path("results") / name
    commands = [c["command"] for c in Store(folder).commands() if not _is_retry(c["command"])]
    if not commands:
        raise VitsweepError(f"There is no sweep `{name}` under `results/`.")
    again = f"sweep.retry=[{','.join(statuses)}]"
    return ["-m", *_overrides_of(commands[-1]), *extra, again]


def _is_retry(command: str) -> bool:
    return _words(command)[:1] == ["retry"]


def _words(command: str) -> list[str]:
    """Return what was typed after `python -m vitsweep` (or `vitsweep`)."""
    words = shlex.split(command)
    return words[3:] if words[:3] == ["python", "-m", "vitsweep"] else words[1:]


def _overrides_of(command: str) -> list[str]:
    noise = ("-m", "--multirun")
    return [w for w in _words(command) if w not in noise and "sweep.retry=" not in w]


def _parsed(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    name, statuses, extra = "default", [str(s) for s in Status if s not in NOT_RETRIED], []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--status":
            statuses = _checked(rest.pop(0) if rest else "")
        elif word == "--set":
            continue
        elif "=" in word:
            extra.append(word)
        else:
            name = word
    return name, statuses, extra


def _checked(text: str) -> list[str]:
    wanted = [word for word in text.split(",") if word]
    known = [str(s) for s in Status if s not in NOT_RETRIED]
    wrong = [word for word in wanted if word not in known]
    if wrong or not wanted:
        raise VitsweepError(f"`--status {text}`: name some of {', '.join(known)}.")
    return wanted
