"""A cell in processes that something else has started: torchrun, srun, or a stock Hydra launcher."""

import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from vitsweep.errors import ImpossibleCellError, VitsweepError
from vitsweep.results.store import Store
from vitsweep.spec.machine import Machine
from vitsweep.sweep.code_state import code_state
from vitsweep.sweep.compose import Composer
from vitsweep.sweep.grid import expand
from vitsweep.sweep.make import freeze, open_store, roster_of
from vitsweep.sweep.request import RunRequest
from vitsweep.sweep.roster import Entry
from vitsweep.world import environment_rank


def run_in_place(overrides: Sequence[str]) -> int:
    """Run one cell as one of the ranks that torchrun or srun started.

    Raises:
        VitsweepError: several cells are asked for, or the world is not what the cell needs.
    """
    composer = Composer()
    asked = expand([o for o in overrides if not o.startswith("-")], composer)
    if len(asked) != 1:
        raise VitsweepError(
            f"{len(asked)} cells are asked for, but the ranks that are running make one cell: give "
            "single values, or sweep without torchrun and srun."
        )
    place = environment_rank()
    assert place is not None, "called in a distributed environment only"
    rank, local_rank, size = place
    per_node = int(
        os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", size))
    )
    tree = asked[0].tree
    tree["resources"] |= {"nodes": size // per_node, "ranks_per_node": per_node}
    tree["sweep"]["baseline"] = None
    roster = roster_of(asked, Machine.here(), composer)
    entry = next(iter(roster.entries.values()))
    if entry.reasons:
        raise ImpossibleCellError(entry.reasons)
    store = open_store(tree)
    if rank == 0:
        freeze(store, roster, tree, code_state())
    _run_rank(store, entry, rank, local_rank)
    return 0


def run_composed(config: Any) -> None:
    """Run one composed cell for a stock launcher of Hydra, with ranks of its own on this node."""
    from omegaconf import OmegaConf

    from vitsweep.sweep.asked import Asked
    from vitsweep.sweep.local import launch

    tree: Mapping[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    raise NotImplementedError((Asked, launch, tree))


def _run_rank(store: Store, entry: Entry, rank: int, local_rank: int) -> None:
    """Meet the other ranks, then do what a worker does; the environment names the rendezvous."""
    from vitsweep.sweep.worker import rank_here

    request = RunRequest(
        sweep_folder=store.root.absolute(),
        cell_id=entry.cell_id,
        run_id=f"in-place-{secrets.token_hex(4)}",
        block=f"in-place-{secrets.token_hex(4)}",
        position=0,
        init_method="env://",
        environment={"launcher": "in place", "vitsweep": version("vitsweep")},
    )
    rank_here(request, entry.cell, rank, local_rank)
