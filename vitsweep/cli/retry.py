"""`vitsweep retry`: the cells of a sweep once more that ended otherwise, whichever command asked."""

import shlex
from collections.abc import Iterator, Sequence

from vitsweep.cli.retry_options import RetryOptions
from vitsweep.composition.override_text import value_override
from vitsweep.errors import VitsweepError
from vitsweep.results.find import find_sweep
from vitsweep.results.store import Store

OF_THE_RUN = ("sweep.retry", "sweep.remeasure", "sweep.folder", "sweep.name")
"""What a cell's own command said of the sweep that a retry says anew."""


def retries(options: RetryOptions) -> list[list[str]]:
    """Return the command lines that run cells again, one for each launcher they were asked with.

    Raises:
        VitsweepError: there is no such sweep, or it was made by `compare`.
    """
    store, groups = find_sweep(options.sweep), dict[tuple[str, ...], list[list[str]]]()
    again = f"sweep.retry=[{','.join(options.statuses)}]"
    for command in store.commands()[-1:]:
        if _words(command["command"])[:1] == ["compare"]:
            raise VitsweepError(
                f"Sweep `{store.name}` was made by `compare`: type `{command['command']} "
                f"{again}` to measure again what ended otherwise."
            )
    for cell_id in _ended(store, options.statuses):
        own = [str(text) for text in store.frozen(cell_id)["overrides"]]
        of_sweep = [t for t in own if _is_sweep(t) and _key(t) not in OF_THE_RUN]
        key = (*_launcher(store, cell_id), *of_sweep)
        groups.setdefault(key, []).append([text for text in own if not _is_sweep(text)])
    where = [
        value_override("sweep.folder", str(store.root.parent)),
        value_override("sweep.name", store.name),
    ]
    return [
        ["-m", *key, *where, again, value_override("sweep.cells", cells), *options.overrides]
        for key, cells in groups.items()
    ]


def _ended(store: Store, statuses: Sequence[str]) -> Iterator[str]:
    from vitsweep.tables.load import cells_of

    for row in cells_of(store).to_dict("records"):
        if row["status"] in statuses:
            yield str(row["cell_id"])


def _launcher(store: Store, cell_id: str) -> list[str]:
    """Return what the latest command that was typed for a cell said of Hydra and of its launcher."""
    commands = [c for c in store.commands() if _words(c["command"])[:1] != ["retry"]]
    of_cell = [c for c in commands if cell_id in (*c["cells"], *c["baselines"])]
    latest = (of_cell or commands)[-1:]
    words = [word for command in latest for word in _words(command["command"])]
    return [word for word in words if _is_for_hydra(word)]


def _is_for_hydra(word: str) -> bool:
    """Tell a flag, its value, or a setting of Hydra's own node; a retry is no search any more."""
    if word.startswith("-") or "=" not in word:
        return word not in ("-m", "--multirun") and not word.startswith("~")
    key = _key(word)
    return key.startswith(("hydra/", "hydra.")) and not key[6:].startswith("sweeper")


def _is_sweep(text: str) -> bool:
    return _key(text).split(".")[0] == "sweep"


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _words(command: str) -> list[str]:
    """Return what was typed after `python -m vitsweep` (or `vitsweep`)."""
    words = shlex.split(command)
    return words[3:] if words[:3] == ["python", "-m", "vitsweep"] else words[1:]
