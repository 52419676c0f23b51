"""The launcher of this machine: one cell at a time, each run in fresh processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from vitsweep.console import open_console
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.machine import Machine
from vitsweep.sweep.asked import Asked
from vitsweep.sweep.blocks import blocks
from vitsweep.sweep.code_state import code_state
from vitsweep.sweep.compose import Composer
from vitsweep.sweep.finish import Ending, finish
from vitsweep.sweep.make import freeze, open_store, roster_of
from vitsweep.sweep.missing import announce, known
from vitsweep.sweep.progress import Progress, labels
from vitsweep.sweep.roster import Roster
from vitsweep.sweep.runner import Runner


def launch(
    asked: Sequence[Asked],
    config: dict[str, Any],
    fields: dict[str, Any],
    composer: Composer,
    ending: Ending = finish,
) -> list[Mapping[str, Any]]:
    """Run what is missing of the cells; return the row of each, in the order asked for.

    Args:
        asked: cells of the command.
        config: composed configuration; its `sweep` node says where results go.
        fields: of conf/hydra/launcher/local.yaml.
        composer: composes the baselines.
        ending: what is done with the rows at the end: tables, charts and the report, or nothing.

    Raises:
        BadValueError: a value is wrong; nothing has run.
        SystemExit: 130 after Ctrl-C.
    """
    console = open_console()
    roster = roster_of(asked, Machine.here(), composer)
    store = open_store(config)

    def told() -> None:
        console.print(f"Another command is measuring into `{store.root}`; waiting for it to end.")

    with store.lock(on_wait=told):
        code = code_state()
        freeze(store, roster, config, code)
        interrupted = _run(store, roster, config, code, console, int(fields.get("parallel", 1)))
        return ending(store, roster, console, interrupted, config.get("tracker"))


def run_beside_others(asked: Asked, config: dict[str, Any], composer: Composer) -> None:
    """Run one cell, and its baseline, while other processes run other cells of the same sweep.

    So a stock launcher of Hydra runs them. There is no lock to wait for and no table: `collect`
    makes it afterwards.

    Raises:
        VitsweepError: the cell ended otherwise than measured; its record says so as well.
    """
    roster, store, code = (
        roster_of([asked], Machine.here(), composer),
        open_store(config),
        code_state(),
    )
    freeze(store, roster, config, code)
    _run(store, roster, config, code, open_console(), parallel=1)
    [cell_id] = [entry.cell_id for entry in roster.entries.values() if not entry.added]
    ends = [run for run in store.runs() if run.cell_id == cell_id]
    if not any(run.status == Status.measured for run in ends):
        reasons = roster.entries[cell_id].reasons or [f"{r.status}: {r.reason}" for r in ends[-1:]]
        raise VitsweepError(f"Cell {cell_id} was not measured. {' '.join(reasons)}")


def _run(
    store: Store,
    roster: Roster,
    config: dict[str, Any],
    code: dict[str, Any],
    console: Console,
    parallel: int,
) -> bool:
    """Run what is missing; True if the user stopped it."""
    todo = known(roster, store.runs(), config["sweep"], code)
    announce(todo, f"`vitsweep retry {store.name}` runs them again", console)
    runner, size = Runner(store, code, parallel), int(config["sweep"].get("cells_per_block", 8))
    first, missing = runner.continued(roster, todo.missing, size, console)
    planned = [*first, *blocks(roster, missing, size)]
    if not planned and roster.runnable:
        console.print("Everything that was asked for is measured already.")
    progress = Progress(console, labels(roster), sum(len(block.entries) for block in planned))
    return runner.run(planned, progress)
