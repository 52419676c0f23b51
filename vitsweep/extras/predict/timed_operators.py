"""Operators and collectives of the cells of a plan, timed on this machine's processor and kept (no torch).

They are kept in `$XDG_CONFIG_HOME/vitsweep/calibrations` (`~/.config/...`), one file per processor. On a GPU
nothing is timed: its rates follow from its profile.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitsweep.control_group import allowed_cores
from vitsweep.execution.process import end_with_launcher, exit_now, joined_process_group
from vitsweep.execution.rank_processes import LocalRanks, fork_server, rendezvous, wait_for_ranks
from vitsweep.extras.predict.step_time import (
    BY_WEIGHT,
    CollectiveTotal,
    Exchanges,
    OperatorTotal,
    Shapes,
    StepTrace,
)
from vitsweep.files import home_folder, write_atomically, write_cache_file
from vitsweep.foreign import parsed_json
from vitsweep.rates.profile import device_name, processor
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Resources

SCHEMA = 1
"""Of the file."""
SECONDS = 120.0
"""Most that all measurements of one number of ranks may take, which last 2 s on an idle machine."""
WAY = 2
"""Number of the way in which operators are timed; what was timed in another way is timed anew."""
LARGEST_EXCHANGE = 1 << 24
"""Bytes of the largest collective that is timed; two sizes say how longer ones grow."""

Times = dict[str, list[dict[str, Any]]]
"""`operators` as `operators.operator_times` returns them, `collectives` as `operators.collective_times`."""
NOTHING: Times = {"operators": [], "collectives": []}


def timed_ranks(resources: Resources) -> tuple[int, int]:
    """Return the ranks, two at most, and their threads under which operators of a cell are timed here."""
    cores = allowed_cores()
    threads = min(resources.threads_per_rank, cores)
    return max(1, min(2, resources.ranks_per_node, cores // threads)), threads


def timed_key(ranks: int, threads: int) -> str:
    """Return what must be equal for times of operators to hold.

    The name of a processor does not tell its generation on every virtual machine; its numbers do.
    """
    return f"{ranks}x{threads} torch {torch_here()} on {processor()}, way {WAY}"


@cache
def torch_here() -> str:
    """Return the version of torch, without importing it; to look it up takes milliseconds."""
    return version("torch")


def kept_file() -> Path:
    """Return the path of the file that keeps the operator times of this processor."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or home_folder() / ".config")
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(device_name("cpu"))).strip("-").lower()
    return base / "vitsweep" / "calibrations" / f"{name}.json"


def kept_times() -> dict[str, Times]:
    """Return `timed_key` -> times that are kept of this processor.

    Raises:
        ValueError: the file is damaged, or of another processor.
    """
    path, device = kept_file(), device_name("cpu")
    if not path.is_file():
        return {}
    try:
        tree = parsed_json(path.read_text(encoding="utf-8"))
        if (tree["schema"], tree["device"]) != (SCHEMA, device):
            raise ValueError(f"schema {tree['schema']}, of {tree['device']}")
        return dict(tree.get("timed", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`{path}`, which keeps rates of this machine, is damaged ({error}): remove it"
        ) from error


def keep_times(key: str, times: Times) -> None:
    """Keep times of operators, and drop those of another torch, processor or way to time them.

    Where nothing can be written nothing is kept.
    """
    hold = key.partition(" ")[2]
    timed = {k: v for k, v in kept_times().items() if k.partition(" ")[2] == hold}
    tree = {"schema": SCHEMA, "device": device_name("cpu"), "timed": timed | {key: times}}
    write_cache_file(kept_file(), json.dumps(tree, indent=1).encode())


def shapes_of(traces: Iterable[StepTrace], known: Iterable[dict[str, Any]]) -> Shapes:
    """Return the products and attentions of steps that are not among the known ones, by dtype."""
    timed = {(row["dtype"], row["name"], tuple(row["shape"])) for row in known}
    found: dict[str, dict[tuple[str, tuple[int, ...]], None]] = {"float32": {}}  # the first one
    for operator in (o for trace in traces for o in trace.operators if o.flops):
        wanted = timed_as(operator)
        if (operator.dtype, *wanted) not in timed and not operator.dtype.startswith("float8"):
            found.setdefault(operator.dtype, {})[wanted] = None
    return {dtype: [*wanted] for dtype, wanted in found.items()}


def timed_as(operator: OperatorTotal) -> tuple[str, tuple[int, ...]]:
    """Return name and shape of what is timed for an operator; a convolution is one of a linear layer."""
    if operator.kind == "attention":
        return "attention", operator.shape
    name = "bmm" if operator.name == "baddbmm" else operator.name
    if name == "bmm":
        return name, operator.shape
    batch, m, n, k = operator.shape
    return name if name in ("mm", BY_WEIGHT) else "addmm", (1, batch * m, n, k)


def exchanges_of(traces: Iterable[StepTrace], known: Iterable[dict[str, Any]]) -> Exchanges:
    """Return the collectives of steps that are not among the known ones."""
    timed = {(row["name"], row["dtype"], row["bytes"]) for row in known}
    found: dict[tuple[str, str, int], None] = {}
    for collective in (c for trace in traces for c in trace.collectives if c.group_ranks > 1):
        size = max(4, collective.bytes_whole)
        few = (size,) if size <= LARGEST_EXCHANGE else (LARGEST_EXCHANGE // 4, LARGEST_EXCHANGE)
        found |= {(*exchanged_as(collective), each): None for each in few}
    return [each for each in found if each not in timed]


def exchanged_as(collective: CollectiveTotal) -> tuple[str, str]:
    """Return name and dtype of the collective that is timed for one."""
    name = "broadcast" if collective.name == "send" else collective.name
    return name, collective.dtype if collective.dtype in ("bfloat16", "float16") else "float32"


def time_operators(cells: Iterable[tuple[CellSpec, StepTrace]]) -> None:
    """Time operators of cells on this machine's processor that are not known, and keep the times.

    Raises:
        RuntimeError: the ranks failed, or had too little time.
        ValueError: what is kept of this processor is damaged.
    """
    alike: dict[tuple[int, int], list[tuple[CellSpec, StepTrace]]] = defaultdict(list)
    for cell, trace in cells:
        alike[timed_ranks(cell.resources)].append((cell, trace))
    for (ranks, threads), group in alike.items():
        known = kept_times().get(timed_key(ranks, threads), NOTHING)
        traces = [trace for _, trace in group]
        shapes = shapes_of(traces, known["operators"])
        exchanges = exchanges_of(traces, known["collectives"]) if ranks > 1 else []
        if known["operators"] and not any((*shapes.values(), exchanges)):
            continue
        cell = group[0][0]
        resources = replace(cell.resources, nodes=1, ranks_per_node=ranks, threads_per_rank=threads)
        mesh = replace(cell.mesh, **dict.fromkeys(vars(cell.mesh), 1) | {"replicate": ranks})
        elementwise = {row["dtype"] for row in known["operators"] if row["kind"] == "memory"}
        others = tuple(dtype for dtype in shapes if dtype not in elementwise)
        found = _measure(replace(cell, resources=resources, mesh=mesh), shapes, others, exchanges)
        keep_times(timed_key(ranks, threads), {n: [*known[n], *found[n]] for n in NOTHING})


def _measure(
    cell: CellSpec, shapes: Shapes, others: Sequence[str], exchanges: Exchanges
) -> dict[str, Any]:
    """Let the ranks of a cell time operators; return the times.

    Args:
        cell: whose ranks.
        shapes: of products and attentions.
        others: dtypes whose element-wise operators are timed besides them.
        exchanges: collectives.
    """
    with TemporaryDirectory() as folder, rendezvous() as init_method:
        answer = Path(folder) / "rates.json"
        wanted = (shapes, others, exchanges)
        arguments = (cell, wanted, init_method, str(answer))
        world = range(cell.resources.world_size)
        ranks = LocalRanks(fork_server(), measure_rank, arguments, world, answer.parent)
        try:
            wait_for_ranks(ranks, SECONDS, grace_seconds=1.0)
        finally:
            ranks.kill()
        with suppress(OSError, ValueError):
            return dict(json.loads(answer.read_text(encoding="utf-8")))
        logs = "\n".join(
            p.read_text(encoding="utf-8", errors="replace")[-2000:]
            for p in Path(folder).glob("rank*.log")
        )
    why = logs.strip() or f"nothing was measured within {SECONDS:.0f} s: is the machine busy?"
    raise RuntimeError(f"The ranks could not measure their rates: {why}")


def measure_rank(
    cell: CellSpec,
    wanted: tuple[Shapes, Sequence[str], Exchanges],
    init_method: str,
    answer: str,
    rank: int,
    local_rank: int,
) -> None:
    """Run one rank; rank 0 writes times of operators and collectives as JSON to `answer`."""
    from vitsweep.extras.predict.operators import collective_times, operator_times

    end_with_launcher()
    limit = replace(cell.measurement, timeout_min=SECONDS / 60)
    shapes, others, exchanges = wanted
    try:
        with joined_process_group(
            replace(cell, measurement=limit), rank, local_rank, init_method
        ) as world:
            operators = operator_times(shapes, others)
            found = {"operators": operators, "collectives": collective_times(world, exchanges)}
            if rank == 0:
                write_atomically(Path(answer), json.dumps(found))
    except Exception as error:
        print(f"Rank {rank} could not time operators: {error}", file=sys.stderr)
        exit_now(1)
