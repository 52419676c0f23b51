"""What a step sends: bytes counted at the real collectives, time read from a profiler."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._python_dispatch import TorchDispatchMode

from vitsweep.collectives.purpose import Purpose, current_purpose

RECEIVES = {torch.ops.c10d.recv_.default, torch.ops.c10d.recv_any_source_.default}
"""Counted where they are sent."""

_BY_COLLECTIVE: dict[str, Purpose] = {
    "all_gather": "parameter",
    "broadcast": "parameter",
    "all_reduce": "gradient",
    "reduce_scatter": "gradient",
}
"""What data parallelism sends with a collective; parallelism of activations says so itself."""


class CommunicationCounter(TorchDispatchMode):
    """Counts calls and bytes that this rank sends, per collective and purpose.

    A collective over n ranks on a tensor of b bytes (the whole, gathered one) sends from each rank:
    all-gather, reduce-scatter, all-to-all, broadcast (n-1)/n b; all-reduce 2(n-1)/n b (Rabenseifner,
    ring); send b.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: defaultdict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; book it if it is a collective."""
        result = func(*args, **(kwargs or {}))
        if func in collective_ops and func not in sync_ops and func not in RECEIVES:
            self._book(func, result, args, kwargs or {})
        return result

    def sent(self, purpose: Purpose) -> float:
        """Bytes this rank sent for a purpose."""
        return float(sum(b for (_, booked), b in self.bytes.items() if booked == purpose))

    def by_collective(self) -> dict[str, dict[str, float]]:
        """Return `collective/purpose` -> calls and bytes, for the run's JSON."""
        return {
            f"{name}/{purpose}": {"calls": calls, "bytes": self.bytes[name, purpose]}
            for (name, purpose), calls in sorted(self.calls.items())
        }

    def _book(self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = _collective(func)
        ranks = CollectiveOp.get_process_group(func, args).size()
        purpose = current_purpose() or _BY_COLLECTIVE.get(name, "activation")
        self.calls[name, purpose] += 1
        self.bytes[name, purpose] += _sent(name, ranks, _whole_bytes(func, result, args, kwargs))


def _collective(func: Any) -> str:
    name = func._schema.name.split("::")[-1]
    for known in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
        if known.replace("_", "") in name.replace("_", ""):
            return known
    return str(name).strip("_")


def _whole_bytes(func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if func is torch.ops.c10d.allreduce_.default:
        return sum(t.nbytes for t in args[0])
    return int(CollectiveOp.get_comm_tensor_size(func, result, args, kwargs))


def _sent(name: str, ranks: int, whole_bytes: int) -> float:
    share = (ranks - 1) / ranks
    if name == "all_reduce":
        return 2 * share * whole_bytes
    if name in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return share * whole_bytes
    return whole_bytes


def collective_ms(step: Callable[[], object], device: torch.device) -> float:
    """Return the time that one step spends inside collectives, overlapped with compute or not.

    Args:
        step: runs one training step.
        device: where it runs; on CUDA the time of NCCL's kernels, on CPU gloo's own.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        step()
        return 0.0
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        step()
    assert profiled.profiler is not None
    # As recorded: `profiled.events()` builds a tree of them all, a second for ten thousand events.
    recorded = profiled.profiler.kineto_results.events()
    nanos = sum(e.duration_ns() for e in recorded if e.name().startswith(("gloo:", "nccl")))
    return float(nanos) / 1e6
