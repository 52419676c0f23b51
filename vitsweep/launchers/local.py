"""The launcher of this machine: one cell at a time, each run in fresh processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from vitsweep.cli.summary import Ending, finish
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import VitsweepError
from vitsweep.launchers.block_runner import Runner
from vitsweep.launchers.local_settings import local_settings
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import blocks
from vitsweep.planning.freeze import freeze, open_store, plan_of
from vitsweep.planning.pending import announce, known
from vitsweep.planning.provenance import code_state
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.machine import Machine


def launch(
    asked: Sequence[ComposedCell],
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
    console, settings = open_console(), sweep_settings(config)
    parallel = local_settings(fields).parallel
    plan = plan_of(asked, Machine.here(), composer)
    store = open_store(settings)

    def told() -> None:
        console.print(f"Another command is measuring into `{store.root}`; waiting for it to end.")

    with store.lock(on_wait=told):
        code = code_state()
        freeze(store, plan, settings, code)
        interrupted = _run(store, plan, settings, code, console, parallel)
        return ending(store, plan, console, interrupted, config.get("tracker"))


def run_beside_others(asked: ComposedCell, config: dict[str, Any], composer: Composer) -> None:
    """Run one cell, and its baseline, while other processes run other cells of the same sweep.

    So a stock launcher of Hydra runs them. There is no lock to wait for and no table: `collect`
    makes it afterwards.

    Raises:
        VitsweepError: the cell ended otherwise than measured; its record says so as well.
    """
    settings = sweep_settings(config)
    plan, store, code = (
        plan_of([asked], Machine.here(), composer),
        open_store(settings),
        code_state(),
    )
    freeze(store, plan, settings, code)
    _run(store, plan, settings, code, open_console(), parallel=1)
    [cell_id] = [entry.cell_id for entry in plan.entries.values() if not entry.is_added_baseline]
    ends = [run for run in store.runs() if run.cell_id == cell_id]
    if not any(run.status == Status.measured for run in ends):
        reasons = plan.entries[cell_id].reasons or [f"{r.status}: {r.reason}" for r in ends[-1:]]
        raise VitsweepError(f"Cell {cell_id} was not measured. {' '.join(reasons)}")


def _run(
    store: Store,
    plan: SweepPlan,
    settings: SweepSettings,
    code: dict[str, Any],
    console: Console,
    parallel: int,
) -> bool:
    """Run what is missing; True if the user stopped it."""
    todo = known(plan, store.runs(), settings, code)
    announce(todo, f"`vitsweep retry {store.name}` runs them again", console)
    runner, size = Runner(store, code, parallel), settings.cells_per_block
    first, missing = runner.continued(plan, todo.missing, size, console)
    planned = [*first, *blocks(plan, missing, size)]
    if not planned and plan.runnable:
        console.print("Everything that was asked for is measured already.")
    progress = Progress(console, cell_labels(plan), sum(len(block.entries) for block in planned))
    return runner.run(planned, progress)
