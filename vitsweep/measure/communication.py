"""Communication of a step: bytes counted at the real collectives, time read from a profiler; its trace."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from vitsweep.collectives.primitives import Purpose, current_purpose
from vitsweep.files import make_folder, remove
from vitsweep.model.block import blocks_of
from vitsweep.world import World

# torch's profiler, without the messages that it prints.


ABOVE_ALL = "6"
"""A level of Kineto's log above its highest, USDT (5): it prints every start and stop at that one."""


def quiet_profile(
    activities: "Sequence[ProfilerActivity]", *, record_shapes: bool = False
) -> "profile":
    """Return a profiler for a `with` block; Kineto reads its log level when the first one starts."""

    os.environ.setdefault("KINETO_LOG_LEVEL", ABOVE_ALL)
    return profile(activities=activities, record_shapes=record_shapes)


RECEIVES = {torch.ops.c10d.recv_.default, torch.ops.c10d.recv_any_source_.default}
"""Not counted: their bytes are counted at the sender."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_BY_COLLECTIVE: dict[str, Purpose] = {
    "all_gather": "parameter",
    "broadcast": "parameter",
    "all_reduce": "gradient",
    "reduce_scatter": "gradient",
}
"""What data parallelism uses a collective for; parallelism of activations states its purpose itself."""
DATA_PARALLEL = tuple(
    f"{Path(torch.__file__).parent}/{part}"
    for part in (
        "distributed/fsdp/", "distributed/_composable/", "distributed/algorithms/", "distributed/optim/",
        "nn/parallel/", "nn/utils/", "optim/", "amp/", "autograd/graph.py", "autograd/__init__.py",
    )
)  # fmt: skip
"""Parts of torch that send parameters and gradients; autograd's engine calls the reducer of DDP."""
OWN = f"{Path(__file__).parents[1]}/"
PLUMBING = f"{Path(torch.__file__).parent}/"
AUTOGRAD_FUNCTION = f"{PLUMBING}autograd/function.py"
STANDARD_LIBRARY = f"{Path(os.__file__).parent}/"


@dataclass(kw_only=True)
class SentBytes:
    """What one rank sends in one step.

    Attributes:
        by_purpose: one of `collectives.primitives.Purpose` -> bytes; empty where not counted.
        by_collective: `collective/purpose` -> calls and bytes.
        reason: why it was not counted, or "".
    """

    by_purpose: dict[str, float] = field(default_factory=dict)
    by_collective: dict[str, dict[str, float]] = field(default_factory=dict)
    reason: str = ""


@contextmanager
def counted_bytes() -> Iterator[SentBytes]:
    """Count what this rank sends inside the block, a training step; it is known at the end.

    A collective over n ranks on a tensor of b bytes (the whole, gathered one) sends from each rank:
    all-gather, reduce-scatter, all-to-all, broadcast (n-1)/n b; all-reduce 2(n-1)/n b (Rabenseifner,
    ring); send b.
    """
    found, calls = SentBytes(), defaultdict[tuple[str, str], list[float]](list)

    def count(func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call := read(func, result, args, kwargs):
            calls[call.name, call.purpose].append(call.bytes_sent)

    try:
        read = CollectiveReader()
    except (ImportError, AttributeError) as error:
        found.reason = f"this torch lists no collectives as they are read here ({error})"
        yield found
        return
    with Observing(count):
        yield found
    found.by_purpose |= dict.fromkeys(get_args(Purpose), 0.0)
    for (name, purpose), sent in sorted(calls.items()):
        found.by_purpose[purpose] += sum(sent)
        found.by_collective[f"{name}/{purpose}"] = {"calls": len(sent), "bytes": float(sum(sent))}


class Observing(TorchDispatchMode):
    """Context that calls `observe(func, result, args, kwargs)` for each operation; private to torch."""

    def __init__(self, observe: Callable[..., None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with what the operation does on this rank
        result = func(*args, **(kwargs or {}))
        self._observe(func, result, args, kwargs or {})
        return result


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call of a collective.

    Attributes:
        name: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`.
        purpose: what is sent.
        group: the ranks that take part.
        bytes_whole: of the whole tensor, gathered or not yet scattered.
        bytes_sent: what this rank sends, see `counted_bytes`.
    """

    name: str
    purpose: str
    group: Any
    bytes_whole: int
    bytes_sent: float


class CollectiveReader:
    """Tells which operations are collectives, and what they send.

    Raises:
        ImportError, AttributeError: this torch has no tables of collectives as they are read here.
    """

    def __init__(self) -> None:
        from torch.distributed._tools import fake_collectives as tables  # private to torch

        self._all = tables.collective_ops
        self._counted = tables.collective_ops - tables.sync_ops - RECEIVES
        self._op = tables.CollectiveOp

    def is_collective(self, func: Any) -> bool:
        """Whether an operation belongs to a collective: its start, or waiting for its end."""
        return func in self._all

    def __call__(
        self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CollectiveCall | None:
        """Return what an operation sends, or None where it starts no collective."""
        if func not in self._counted:
            return None
        name = _collective(func)
        group = self._op.get_process_group(func, args)
        if func is torch.ops.c10d.allreduce_.default:
            whole = sum(t.nbytes for t in args[0])
        else:
            whole = int(self._op.get_comm_tensor_size(func, result, args, kwargs))
        return CollectiveCall(
            name=name,
            purpose=current_purpose() or _purpose_of_caller(name),
            group=group,
            bytes_whole=whole,
            bytes_sent=_sent(name, group.size(), whole),
        )


def _purpose_of_caller(collective: str) -> Purpose:
    """Return what a collective without `sent_as` is for: that of data parallelism, where this called it.

    The caller is the nearest one that is neither torch's plumbing of collectives nor Python's own.
    """
    frame, by_data_parallelism = sys._getframe(1).f_back, True
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith((*DATA_PARALLEL, OWN)) and path != __file__:
            break
        is_plumbing = path.startswith((PLUMBING, "<")) and path != AUTOGRAD_FUNCTION
        is_pythons = path.startswith(STANDARD_LIBRARY) and "-packages/" not in path
        if not (is_plumbing or is_pythons or path == __file__):
            by_data_parallelism = False
            break
        frame = frame.f_back
    return _BY_COLLECTIVE.get(collective, "activation") if by_data_parallelism else "unattributed"


def _collective(func: Any) -> str:
    name = func._schema.name.split("::")[-1]
    for known in COLLECTIVES:
        if known.replace("_", "") in name.replace("_", ""):
            return known
    return str(name).strip("_")


def _sent(name: str, ranks: int, whole_bytes: int) -> float:
    share = (ranks - 1) / ranks
    if name == "all_reduce":
        return 2 * share * whole_bytes
    if name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return share * whole_bytes
    return whole_bytes


Collectives = list[tuple[str, float, float]]
"""(name, start, duration) of the collectives of one step on one rank, in the order of their start.

Milliseconds; starts are on the clock of the rank's machine.
"""


def profile_collectives(step: Callable[[], object], device: torch.device) -> Collectives:
    """Run one training step under the profiler; return its collectives, of one rank none without a step.

    Args:
        step: runs one training step.
        device: where it runs; on CUDA the durations of NCCL's kernels, on CPU those of gloo's work.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []

    cuda = device.type == "cuda"
    with quiet_profile([ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        step()
    assert profiled.profiler is not None
    # As recorded: `profiled.events()` builds a tree of them all, a second for ten thousand events.
    recorded = profiled.profiler.kineto_results.events()
    found = [e for e in recorded if e.name().startswith(("gloo:", "nccl"))]
    found.sort(key=lambda event: event.start_ns())
    return [(e.name().split("(")[0], e.start_ns() / 1e6, e.duration_ns() / 1e6) for e in found]


def transfers_ms(ranks: Sequence[Collectives], machines: Sequence[str]) -> list[float] | None:
    """Return how long each collective transfers: from the arrival of its last rank to its median end.

    A rank that enters a collective early waits in it for the others. The shortest duration over the
    ranks would leave out the waiting too, but ranks end a little earlier or later than others: the more
    ranks, the shorter the shortest. Clocks of machines differ, and all see a collective end at about
    the same time: the median difference of these ends is taken for the difference of the clocks.

    Args:
        ranks: collectives of each rank.
        machines: on which each rank runs.

    Returns:
        Milliseconds; None where ranks run different collectives (stages of a pipeline).
    """
    names = [[name for name, *_ in rank] for rank in ranks]
    if any(other != names[0] for other in names):
        return None
    times = np.array([[both for _, *both in rank] for rank in ranks]).reshape(len(ranks), -1, 2)
    starts, durations = times[..., 0], times[..., 1]
    ends = starts + durations
    late, places = ends - np.median(ends, axis=0), np.asarray(machines)
    clocks = {m: np.median(late[places == m]) if late.size else 0.0 for m in machines}
    ahead = np.array([clocks[m] for m in machines])[:, None]
    transfers = np.median(ends - ahead, axis=0) - (starts - ahead).max(axis=0)
    # The root of a broadcast does not wait: it can be over before the last rank arrives.
    found: list[float] = np.where(transfers > 0, transfers, durations.min(axis=0)).tolist()
    return found


def communication_ms(ranks: Sequence[Collectives], machines: Sequence[str]) -> float:
    """Return the milliseconds of all transfers, see `transfers_ms`.

    Where ranks run different collectives, waiting for late ranks cannot be distinguished: it is in the mean
    over ranks, which is returned.
    """
    transfers = transfers_ms(ranks, machines)
    if transfers is None:
        return sum(duration for rank in ranks for *_, duration in rank) / len(ranks)
    return sum(transfers)


# A profiler trace of one step, for reading in a browser (chrome://tracing, Perfetto): parts of the model name
# their forward passes.


MODULE = "vitsweep.module."
"""Begins the name of a range in which a module computes forward."""


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model by name: its blocks, and all that is outside of them."""
    blocks = {id(block) for block in blocks_of(model)}

    def parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        inner = {id(child) for child in module.modules()} - {id(module)}
        if name and (id(module) in blocks or not inner & blocks):
            yield name, module
            return
        for child, part in module.named_children():
            yield from parts(f"{name}.{child}" if name else child, part)

    return dict(parts("", model))


@contextmanager
def naming_modules(model: nn.Module) -> Iterator[None]:
    """Let the parts of an uncompiled model name their forward passes in traces, until the block ends."""
    handles = []
    for name, unit in units_of(model).items():
        begun: list[Any] = []

        def enter(*_: object, name: str = name, begun: list[Any] = begun) -> None:
            begun.append(torch.profiler.record_function(MODULE + name))
            begun[-1].__enter__()

        def leave(*_: object, begun: list[Any] = begun) -> None:
            begun.pop().__exit__(None, None, None)

        handles.append(unit.register_forward_pre_hook(enter, prepend=True))
        # recomputation may end a forward pass early, by an exception
        handles.append(unit.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def traced(step: Callable[[], object], folder: Path, world: World) -> Path | None:
    """Run `step` on every rank under the profiler; rank 0 writes `trace.json.gz`."""

    on_gpu = world.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with quiet_profile(activities) as profiled:
        step()
    if world.rank:
        return None
    path = make_folder(folder) / "trace.json.gz"
    remove(path)  # torch would follow a link
    profiled.export_chrome_trace(str(path))
    return path
