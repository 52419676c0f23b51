"""Run a function on several gloo ranks, forked from a server that has imported torch once."""

import faulthandler
import json
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitsweep.execution.rank_processes import fork_server, rendezvous
from vitsweep.world import World, device_mesh

SECONDS_AT_MOST = 300


class RankFailedError(AssertionError):
    """A rank raised; the text holds its traceback."""


def on_ranks(
    world_size: int,
    function: Callable[..., Any],
    cell: Any,
    *arguments: Any,
    folder: Path,
    seconds: float = SECONDS_AT_MOST,
) -> list[Any]:
    """Return what `function(world, *arguments)` returned on each rank.

    `cell` gives the mesh and the threads of the world; the function runs inside it.
    """
    with rendezvous() as init_method:
        processes = [
            fork_server().Process(
                target=_rank,
                args=(function, cell, rank, init_method, arguments, folder),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
            process.kill()
            process.join()
    died = [r for r in range(world_size) if not (folder / f"answer-{r}").exists()]
    if died:  # the others only say that they lost it
        ends = (f"rank {r} with {processes[r].exitcode}\n{_stacks(folder, r)}" for r in died)
        raise RankFailedError(f"ended without an answer, by exit code: {'; '.join(ends)}")
    answers = [_answer(folder / f"answer-{rank}") for rank in range(world_size)]
    errors = [f"rank {r}:\n{text}" for r, (kind, text) in enumerate(answers) if kind == "error"]
    if errors:
        raise RankFailedError("\n".join(errors))
    return [value for _, value in answers]


def _stacks(folder: Path, rank: int) -> str:
    """Return what a rank was doing, in all its threads, when a signal such as SIGSEGV ended it."""
    path = folder / f"stacks-{rank}"
    return path.read_text() if path.exists() else ""


def _answer(path: Path) -> tuple[str, Any]:
    answer: tuple[str, Any] = pickle.loads(path.read_bytes())
    path.unlink()
    return answer


def _rank(
    function: Callable[..., Any],
    cell: Any,
    rank: int,
    init_method: str,
    arguments: tuple[Any, ...],
    folder: Path,
) -> None:
    from vitsweep.execution.process import joined_process_group

    multiprocessing.current_process().daemon = False  # as the ranks of the launcher
    faulthandler.enable((folder / f"stacks-{rank}").open("w"))
    try:
        with joined_process_group(cell, rank, rank, init_method) as world:
            answer = ("value", function(world, *arguments))
    except BaseException:
        answer = ("error", traceback.format_exc())
    (folder / f"answer-{rank}").write_bytes(pickle.dumps(answer))


def placed(world: World, cell: Any) -> World:
    """Return the world on the mesh of another cell of as many ranks, so that they share processes."""
    if cell.mesh == world.shape:
        return world
    return replace(world, shape=cell.mesh, mesh=device_mesh(world.device.type, cell.mesh))


def as_json(value: Any) -> str:
    """Compare nested plain values as text."""
    return json.dumps(value, sort_keys=True, default=str)


__all__ = ["RankFailedError", "World", "as_json", "on_ranks", "placed"]
