"""Small traces by hand, for tests of what is made of them."""

from dataclasses import replace

from vitsweep.extras.predict.step_time import CollectiveTotal, OperatorTotal, StepTrace
from vitsweep.extras.predict.timed_operators import keep_times, timed_key, timed_ranks
from vitsweep.planning.closed_memory import MemoryParts
from vitsweep.spec.cell_spec import CellSpec

NOTHING_HELD = MemoryParts(
    parameters=0, gradients=0, optimizer=0, activations=0, gathered=0, buffers=0, peak=0
)


def product(m: int, n: int, k: int, *, phase: str = "forward", count: int = 1) -> OperatorTotal:
    return OperatorTotal(
        kind="matmul", name="addmm", phase=phase, dtype="bfloat16", shape=(1, m, n, k), count=count,
        flops=2 * m * n * k * count, bytes_moved=2 * (m * k + k * n + m * n) * count,
    )  # fmt: skip


def moved(num_bytes: int, *, phase: str = "forward", count: int = 1) -> OperatorTotal:
    return OperatorTotal(
        kind="memory", name="add", phase=phase, dtype="bfloat16", shape=(num_bytes // 6,),
        count=count, flops=0, bytes_moved=num_bytes * count,
    )  # fmt: skip


def exchange(
    size: int, name: str = "all_reduce", *, ranks: int = 8, nodes: int = 1, count: int = 1,
    purpose: str = "gradient", phase: str = "backward",
) -> CollectiveTotal:  # fmt: skip
    return CollectiveTotal(
        name=name, purpose=purpose, phase=phase, group_ranks=ranks, group_nodes=nodes,
        count=count, bytes_whole=size, bytes_sent=float(size * count),
    )  # fmt: skip


def trace_of(
    *parts: OperatorTotal | CollectiveTotal, dispatches: int = 0, **changes: object
) -> StepTrace:
    operators = tuple(p for p in parts if isinstance(p, OperatorTotal))
    base = StepTrace(
        operators=operators,
        collectives=tuple(p for p in parts if isinstance(p, CollectiveTotal)),
        memory=NOTHING_HELD,
        dispatches={"forward": dispatches, "backward": 0, "optimizer": 0},
        parameters=1,
        flops_per_step=sum(o.flops for o in operators),
        device="cuda",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def timed_before(cell: CellSpec) -> None:
    """Keep one operator's time for the ranks of a cell, as if a plan had timed it."""
    add = {
        "kind": "memory",
        "name": "add",
        "dtype": "float32",
        "shape": [1000],
        "bytes_moved": 12000,
    }
    times = {"operators": [add | {"us": 10.0}], "collectives": []}
    keep_times(timed_key(*timed_ranks(cell.resources)), times)
