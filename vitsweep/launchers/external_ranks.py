"""A cell in processes that something else has started: torchrun, srun, or a stock Hydra launcher."""

from collections.abc import Sequence
from dataclasses import replace

from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.errors import ImpossibleCellError, VitsweepError
from vitsweep.execution.run_request import Run, request_for
from vitsweep.execution.worker import run_rank_in_process
from vitsweep.job_environment import environment_rank, init_method, ranks_per_node
from vitsweep.launchers.base import LaunchResult
from vitsweep.planning.freeze import code_state, freeze, open_store
from vitsweep.planning.machine_defaults import cells_for
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.rates.profile import device_name, profile_of
from vitsweep.spec.resources import Machine


def run_in_place(overrides: Sequence[str]) -> tuple[LaunchResult, SweepSettings] | None:
    """Run one cell as one of the ranks that torchrun or srun started.

    Returns:
        What rank 0 recorded, and the settings of the sweep; None on the other ranks.

    Raises:
        VitsweepError: several cells are asked for, or the cell cannot run in this world.
    """
    composer = Composer()
    typed = [o for o in overrides if not o.startswith("-")]
    cells, _, _ = cells_for(typed, composer, _without_free_memory(Machine.here()))
    if len(cells) != 1:
        raise VitsweepError(
            f"These overrides make {len(cells)} cells, but ranks started by torchrun or srun run one: "
            "give single values, or sweep without torchrun and srun."
        )
    return run_rank(cells[0], composer)


def _without_free_memory(machine: Machine) -> Machine:
    """Return the machine by its device's published memory: what is free differs from rank to rank."""
    profile = profile_of(device_name("cuda") or "", complete=True)
    gib = profile.usable_bytes / 2**30 if profile else None
    return replace(machine, described_by="machine of the ranks", least_gib=gib)


def run_rank(cell: ComposedCell, composer: Composer) -> tuple[LaunchResult, SweepSettings] | None:
    """Do one rank's part of a cell; rank 0 freezes and records it, and returns the result."""
    place = environment_rank()
    assert place is not None, "called where a launcher has set ranks only"
    rank, local_rank, size = place
    per_node = ranks_per_node(size)
    sizes = {"nodes": size // per_node, "ranks_per_node": per_node}
    alone = {"baseline": None}  # ranks of one cell cannot run another
    own = {"resources": cell.tree["resources"] | sizes, "sweep": cell.tree["sweep"] | alone}
    cell = replace(cell, tree=cell.tree | own)
    plan = plan_of([cell], Machine.here(), composer)
    entry = next(iter(plan.entries.values()))
    if entry.reasons:
        raise ImpossibleCellError(entry.reasons)
    settings = sweep_settings(cell.tree)
    store, code = open_store(settings), code_state()
    if rank == 0:
        freeze(store, plan, settings, code, hydra=composer.words)
    request = request_for(
        store,
        Run("", 0, entry.cell_id, ""),  # rank 0 names the run
        init_method=init_method(),
        environment={
            "launcher": "in place",
            "git_commit": code["git_commit"],
            "code_hash": entry.code.hash,
        },
    )
    run_rank_in_process(request, entry.spec, rank, local_rank)
    return (LaunchResult(store=store, plan=plan), settings) if rank == 0 else None
