"""`vitsweep retry`: the cells of a sweep that were not measured, once more."""

import re
from collections.abc import Sequence

from vitsweep.cli import VERBS, Options
from vitsweep.cli.cells import read_line
from vitsweep.cli.main import measure_cells
from vitsweep.composition.frozen import typed_words
from vitsweep.composition.hydra import key_of, value_override
from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import record_unfinished
from vitsweep.launchers.slurm.state.poll import poll
from vitsweep.launchers.slurm.state.status import continue_hint, outcomes_of
from vitsweep.results.provenance import is_own, plain_text
from vitsweep.results.record import RETRIABLE
from vitsweep.results.store import Store
from vitsweep.results.sweeps import find_sweep
from vitsweep.tables.load import cells_of

HELP = """\
Run the cells of a sweep again that were not measured, whichever command they belong to.

An override makes new cells of them:

  python -m vitsweep retry vit_nano-precision --status out_of_memory --set memory=recompute_blocks
"""
LAUNCHER = "hydra/launcher"
OF_THE_COMMAND = ("hydra.mode", "hydra/sweeper", "hydra.sweeper")
"""What Hydra or an earlier search set, which a retry is not."""
SET_BY_RETRY = ("sweep.retry", "sweep.remeasure", "sweep.folder", "sweep.name")
"""Settings of a cell's own command that a retry replaces."""


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument(
        "words", nargs="*", metavar="SWEEP", help="name under results/ or folder (latest)"
    )
    options.add_argument(
        "--status",
        metavar="a,b",
        help="how the cells ended, such as failed or timed_out (all but measured and invalid)",
    )
    options.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="override",
        help="settings that replace the cells' own",
    )


def run(arguments: Sequence[str]) -> int:
    """Run cells again; return the worst exit code of the commands that this takes.

    Raises:
        SweepStopped: the user stopped one; the commands after it do not begin.
    """
    commands, worst = retries(arguments), 0
    for command in commands:
        try:
            worst = max(worst, measure_cells(command))
        except SystemExit as left:  # 3 where cells were not measured again
            worst = max(worst, int(left.code or 0))
    return worst


def retries(arguments: Sequence[str]) -> list[list[str]]:
    """Return the command lines that run cells again, one for each launcher that they were typed with.

    Raises:
        VitsweepError: an option or a status is unknown, several sweeps are named, there is no such
            sweep, or it was made by `compare`.
    """
    options = VERBS["retry"].parser()
    typed = options.read(arguments)
    words = [*typed.words, *typed.set]
    sweeps = [word for word in words if "=" not in word]
    if len(sweeps) > 1:
        options.error(f"one sweep at a time, not {' and '.join(f'`{name}`' for name in sweeps)}")
    statuses = RETRIABLE if typed.status is None else _statuses(typed.status)
    store = find_sweep(sweeps[0] if sweeps else None)
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    again = f"sweep.retry=[{','.join(statuses)}]"
    for command in store.commands()[-1:]:
        if "comparison" in command:
            line = command["command"] if is_own(command) else "the same command with"
            raise VitsweepError(
                f"Sweep `{store.name}` was made by `compare`: type `{line} {again}` to measure again what "
                "was not measured."
            )
    # where it is locked, the command at work may be recording what was killed with another
    if not store.is_locked():
        record_unfinished(store, store.cell_ids())
    overrides = [word for word in words if "=" in word]
    rows = cells_of(store).to_dict("records")
    ended_so = [row for row in rows if row["status"] in statuses]
    asked = ended_so or (rows if overrides else [])  # with all cells overrides are checked at least
    of_cells = typed_words(store, (str(row["cell_id"]) for row in asked))
    for cell_id, own in of_cells.items():
        of_sweep = [t for t in own if _is_sweep(t) and key_of(t) not in SET_BY_RETRY]
        key = (*_launcher(store, cell_id, overrides), *of_sweep)
        groups.setdefault(key, []).append([text for text in own if not _is_sweep(text)])
    where = {"sweep.folder": str(store.root.parent), "sweep.name": store.name}
    more = [*(value_override(*each) for each in where.items()), "machine=cpu", again, *overrides]
    lines = [["-m", *k, *more, value_override("sweep.cells", c)] for k, c in groups.items()]
    if ended_so:
        return lines
    for line in lines:
        read_line(["--quiet", *line]).session()
    jobs = poll(store)
    said = "No cell of the sweep has such a status: there is nothing to run again."
    print(f"{said}\n{continue_hint(store, jobs, outcomes_of(store, jobs))}".strip())
    return []


def _launcher(store: Store, cell_id: str, overrides: Sequence[str]) -> list[str]:
    """Return what the latest command that this user typed for a cell sets of Hydra and of its launcher.

    Raises:
        VitsweepError: somebody else typed it, with a launcher, and none of `overrides` chooses one.
    """
    commands = store.commands()
    of_cell = [c for c in commands if cell_id in (*c.get("cells", ()), *(c.get("baselines") or ()))]
    latest = (of_cell or commands)[-1:]
    kept = [str(word) for command in latest for word in command.get("hydra", ())]
    kept = [word for word in kept if not word.startswith(OF_THE_COMMAND)]
    if all(is_own(command) and "hydra" in command for command in latest):
        return kept
    typed = " ".join([*kept, *(str(command.get("command")) for command in latest)])
    chosen = re.findall(rf"{LAUNCHER}=[\w.-]+", typed)
    if chosen and not any(key_of(word) == LAUNCHER for word in overrides):
        raise VitsweepError(
            f"`{store.root}` was measured with `{plain_text(chosen[-1])}` by somebody else (or by an "
            "earlier version, or before this user's key was lost), and no settings of a launcher are taken "
            f"from there: type `{LAUNCHER}=local`, or your own, behind this command."
        )
    return []


def _is_sweep(text: str) -> bool:
    return key_of(text).split(".")[0] == "sweep"


def _statuses(text: str) -> tuple[str, ...]:
    wanted = tuple(word for word in text.split(",") if word)
    if not wanted or not set(wanted) <= set(RETRIABLE):
        raise VitsweepError(f"`--status {text}`: name some of {', '.join(RETRIABLE)}.")
    return wanted
