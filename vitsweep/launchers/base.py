"""The contract of a launcher, and what every launcher does first.

A launcher takes composed cells and measures those that lack runs: on this machine, on a cluster, or
anywhere else. To add one, subclass `hydra_plugins.vitsweep_launchers.plugin.CellLauncherPlugin`,
and name the class in a YAML of `hydra/launcher`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from vitsweep import extras
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.files import remove, remove_empty
from vitsweep.planning.blocks import within_minutes
from vitsweep.planning.freeze import code_state, command_line, freeze
from vitsweep.planning.pending import CellState, ResumeState, print_notices
from vitsweep.planning.rounds import AddedRounds, Rounds, grid
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, all_refused
from vitsweep.results.provenance import masked_word
from vitsweep.results.store import Store
from vitsweep.results.sweeps import held
from vitsweep.spec.resources import HERE, Machine
from vitsweep.tables.formatting import count


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What a command wants measured.

    Attributes:
        plan: the cells with their baselines, typed and checked, in the order of their rows.
        machine: node that they are planned for.
        settings: the `sweep` node of the configuration, checked.
        console: for what the user should know while cells run.
        command: what to type for the same; empty where `sys.argv` says so.
        metrics: definitions of the user's columns (see `results.user_metrics`).
        rounds: chooses the blocks instead of a grid; called with plan, settings, earlier records and code.
        facts: further entries of the command's line in the store.
        hydra: what was typed besides the overrides of cells (`Composer.words`).
    """

    plan: SweepPlan
    machine: Machine
    settings: SweepSettings
    console: Console
    command: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    rounds: Callable[..., Rounds] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    hydra: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """What a launcher did; the measurements themselves are in the store.

    Attributes:
        store: the sweep folder.
        plan: the cells of the command with their baselines.
        interrupted: the user stopped the command, or detached from submitted jobs.
        cut_short: runs are missing because a node or the time was lost: the same command goes on.
        submitted: cells still have to run somewhere else, so there is nothing to show yet.
        state: of the cells at the end, of a command on this machine.
        reached: how many runs that command took, and of how many.
    """

    store: Store
    plan: SweepPlan
    interrupted: bool = False
    cut_short: bool = False
    submitted: bool = False
    state: ResumeState = field(default_factory=lambda: ResumeState({}, {}))
    reached: str = ""


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A sweep whose cells are checked and frozen, and which this command has locked.

    Attributes:
        store: the sweep folder.
        plan: the cells of the command with their baselines.
        code: state of the code that would measure now, as frozen with the cells.
    """

    store: Store
    plan: SweepPlan
    code: dict[str, Any]


@contextmanager
def prepared(request: LaunchRequest) -> Iterator[PreparedSweep]:
    """Lock the sweep folder, and freeze the cells in it; where that is refused, no new folder stays.

    Raises:
        BadValueError: a race cannot begin, or too many of the images that the cells would read are damaged.
        ImpossibleCellError: every cell of a new sweep is refused.
        VitsweepError: the folder cannot be written.
    """
    store = Store(request.settings.path)
    made = [folder for folder in (store.root, *store.root.parents) if not folder.exists()]
    store = store.create()
    with held(store, request.console):
        try:
            request = admitted(store, request)
            is_searched = request.settings.limit.key  # which tries other values then
            if not (request.plan.runnable or store.commands() or is_searched):
                raise all_refused(request.plan)
            request.console.print(f"{count(len(request.plan.entries), 'cell')} in {store.root}")
            yield frozen(store, request)
        except BaseException:
            if made and not store.commands():
                remove(store.root)
                for folder in made[1:]:
                    remove_empty(folder)
            raise


def rounds_of(
    sweep: PreparedSweep,
    settings: SweepSettings,
    pending: Iterable[tuple[str, str]] = (),
    chosen_by: Callable[..., Rounds] | None = None,
) -> Rounds:
    """Return what chooses the blocks of a command: a grid of all cells, or what a feature adds.

    Args:
        sweep: its store and cells.
        settings: `search` decides.
        pending: (cell id, block) of runs that will be made without this command.
        chosen_by: `LaunchRequest.rounds`.

    Raises:
        BadValueError: a race cannot begin.
        ImpossibleCellError: a race has no cell that can run.
    """
    earlier = list(sweep.store.runs())
    if chosen_by:
        return chosen_by(sweep.plan, settings, earlier, sweep.code)
    if settings.search not in extras.ROUNDS:
        return grid(sweep.plan, settings, earlier, sweep.code, pending)
    added: AddedRounds = extras.load(extras.ROUNDS[settings.search])(
        sweep.plan, settings, sweep.store, sweep.code, earlier
    )
    added.check()
    return added


def expected_minutes(cells: Sequence[PlannedCell], store: Store, on: Machine) -> dict[str, float]:
    """Return cell id -> minutes of a run that an optional feature expects, which keeps what it predicts."""
    found: dict[str, float] = {}
    for module in extras.ADMISSION:
        found |= extras.load(f"{module}:minutes")(cells, store, on)
    return found


def announce(rounds: Rounds, state: ResumeState, sweep: PreparedSweep, console: Console) -> None:
    """Say which cells are measured or frozen anew or not repeated, and what else is to be known.

    Raises:
        VitsweepError: a cell that would run is frozen for another device.
    """
    store = sweep.store
    again = f"`vitsweep retry {store.name}` runs them again"
    if "comparison" in store.commands()[-1]:
        ended = ",".join(sorted({str(run.status) for run in state.not_measured.values()}))
        again = f"`sweep.retry=[{ended}]` at the end of the command measures them again"
    print_notices(state, sweep.plan, store, again, console)
    for entry in coming_cells(sweep.plan, state):
        store.digest(entry.cell_id)
    if num := len(store.refrozen):
        are = "cell is" if num == 1 else "cells are"
        console.print(
            f"{num} {are} frozen anew: `cell.yaml` was damaged, of another cell, or of somebody else."
        )
    baselines = {entry.baseline_id for entry in sweep.plan.entries.values()}
    coming = rounds.num_runs(()) if rounds.earlier and not rounds.is_bounded else {}
    further = [n - state.missing_blocks.get(c, 0) for c, n in coming.items() if c in baselines]
    if (repeated := sum(further)) > 0:
        console.print(f"A baseline runs again beside its cells: {count(repeated, 'run')}.")
    if rounds.notice:
        console.print(rounds.notice)


def coming_cells(plan: SweepPlan, state: ResumeState) -> list[PlannedCell]:
    """Return the cells of a plan of which something runs."""
    return [e for e in plan.runnable if state.cell_state(e) is CellState.runnable]


def admitted(store: Store, request: LaunchRequest) -> LaunchRequest:
    """Leave out, or refuse, what the time or the memory of the command does not allow."""
    plan, machine, settings = request.plan, request.machine, request.settings
    if settings.minutes is not None and settings.search == "grid":
        plan = within_minutes(plan, settings.minutes)
    is_asked = settings.only or settings.max_gpu_hours or machine.described_by != HERE
    for module in extras.ADMISSION if is_asked else ():
        admit = extras.load(f"{module}:admitted")
        plan = admit(plan, settings, request.console, machine, store)
    return replace(request, plan=plan)


def frozen(store: Store, request: LaunchRequest) -> PreparedSweep:
    """Freeze the cells, without the lock where several processes run cells of one sweep at once.

    Raises:
        BadValueError: see `prepared`.
    """
    plan, settings = request.plan, request.settings
    sweep = PreparedSweep(store=store, plan=plan, code=code_state())
    reads_files = any(entry.spec.data.decodes_files for entry in plan.runnable)
    if reads_files or settings.search in extras.ROUNDS:
        rounds = rounds_of(sweep, settings, chosen_by=request.rounds)
        coming = [e.spec for e in coming_cells(plan, rounds.state(()))] if reads_files else []
        if any(cell.data.decodes_files for cell in coming):
            from vitsweep.data.folder_look import check_images  # loads Pillow

            for line in check_images(coming, store.root):
                request.console.print(line)
    command = request.command or command_line()
    facts = {"hydra": [masked_word(word) for word in request.hydra], **request.facts}
    if not (request.rounds or settings.search != "grid" or settings.minutes or settings.limit.key):
        facts["prune_slowdown"] = settings.prune_slowdown  # all else may do with fewer blocks
    freeze(store, plan, settings, sweep.code, request.metrics, command=command, **facts)
    return sweep
